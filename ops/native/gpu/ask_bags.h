// Finds the bags that a rank requests from pooled sections, with the kernels of ask_bags.cu.
//
// DistinctKeys are ordered by owner, section, position; those of pooled sections are kept as often
// as they occur.
//
//     run_starts     the keys of each owner and section: a run
//     order_bags     samples and weights to their keys
//     count_bags, number_bags   a bag begins where the sample or the run changes
//     place_runs     each run's place in the message
//     write_bags     the message
//     begin_bags     which ids begin a bag
//     list_bags      the bags of each member, once the host knows how many there are

#ifndef COLLECTIVE_NATIVE_GPU_ASK_BAGS_H_
#define COLLECTIVE_NATIVE_GPU_ASK_BAGS_H_

#include <cstdint>
#include <vector>

#include "distinct.h"
#include "segments.h"
#include "stream.h"
#include "../wire.h"

namespace collective {
namespace gpu {

// A member whose section is pooled, as ask_bags.cu reads it.
struct BagMemberWords {
  int64_t tile;
  int64_t first, count;      // of its ids among all
  int64_t samples, weights;  // where, in words of what was uploaded; no weights: 0
  int64_t number;            // positive, larger than those of the members after it
  int64_t combiner;
  int64_t positions, bag_samples, bag_scales;  // addresses
};

// Finds bags, and writes the message of all sections.
class BagRequest {
 public:
  // Describes sections to kernels.
  static std::vector<int64_t> KindsOf(const std::vector<Section>& sections) {
    constexpr int64_t kPooled = 1, kWeighted = 2;
    std::vector<int64_t> kinds;
    for (const Section& section : sections)
      kinds.push_back((section.pooled ? kPooled : 0) | (section.weighted ? kWeighted : 0));
    return kinds;
  }

  // `members` of pooled sections are also `member_words` on the device, `kinds` are the sections',
  // and `uploaded` begins with ids: nothing else is at 0.
  BagRequest(Stream* stream, const Tiled<BagMemberWords>& members, const int64_t* member_words,
             const int64_t* uploaded, const int64_t* kinds, int ranks, int64_t sections)
      : stream_(stream),
        tiles_(members.tiles()),
        members_(members.count()),
        member_words_(member_words),
        uploaded_(uploaded),
        kinds_(kinds),
        runs_(static_cast<uint32_t>(ranks * sections)),
        sections_(static_cast<uint32_t>(sections)) {}

  // Numbers the bags of `distinct` of up to `keys` keys. `section_tiles` are any tiles.
  tensorflow::Status Number(const DistinctKeys& distinct, int64_t keys, bool weighted,
                            const uint32_t* section_tiles) {
    const int64_t key_tiles = TilesOf(keys);
    TF_RETURN_IF_ERROR(MakeRoom(keys, weighted));
    TF_RETURN_IF_ERROR(
        stream_->Launch(Kernel::kRunStarts, Grid(1), distinct.counts, runs_, starts_));
    TF_RETURN_IF_ERROR(stream_->Launch(Kernel::kOrderBags, tiles_, member_words_, members_,
                                       uploaded_, distinct.numbers, samples_, weights_, unsorted_));
    TF_RETURN_IF_ERROR(stream_->Launch(Kernel::kCountBags, key_tiles, starts_, runs_, sections_,
                                       kinds_, samples_, bag_counts_));
    TF_RETURN_IF_ERROR(Scan(bag_counts_, key_tiles, section_tiles));
    TF_RETURN_IF_ERROR(stream_->Launch(Kernel::kNumberBags, key_tiles, starts_, runs_, sections_,
                                       kinds_, samples_, bag_counts_, bags_, begins_));
    TF_RETURN_IF_ERROR(stream_->Launch(Kernel::kPlaceRuns, Grid(1), starts_, runs_, sections_,
                                       kinds_, bags_, bag_counts_ + key_tiles, begins_, first_bags_,
                                       places_, told_));
    TF_RETURN_IF_ERROR(stream_->Launch(Kernel::kBeginBags, tiles_, member_words_, members_,
                                       distinct.numbers, bags_, begins_, begun_, begun_counts_));
    return Scan(begun_counts_, tiles_, section_tiles);
  }

  // Writes the message of up to `keys` keys.
  tensorflow::Status Write(const DistinctKeys& distinct, int64_t keys, void* message) {
    return stream_->Launch(Kernel::kWriteBags, TilesOf(keys + runs_), starts_, runs_, sections_,
                           kinds_, distinct.keys, weights_, bags_, begins_, first_bags_, places_,
                           static_cast<int64_t*>(message));
  }

  // Lists the bags of each member. The words at `listed` say where to.
  tensorflow::Status List(const int64_t* listed) {
    return stream_->Launch(Kernel::kListBags, tiles_, listed, members_, uploaded_, begun_,
                           begun_counts_);
  }

  // [2, R] how many bags and keys each run has, and the number of a member whose samples don't
  // ascend from 0 on, 0 if those of all do.
  const int32_t* told() const { return told_; }
  int64_t told_count() const { return 2 * int64_t{runs_} + 1; }

  // [K], the bag of each key: the row of what comes back.
  const uint32_t* bags() const { return bags_; }

 private:
  tensorflow::Status MakeRoom(int64_t keys, bool weighted) {
    void *zeros = nullptr, *room = nullptr;
    TF_RETURN_IF_ERROR(stream_->ZeroScratch((told_count() + 1) * sizeof(int32_t), &zeros));
    told_ = static_cast<int32_t*>(zeros);
    unsorted_ = reinterpret_cast<uint32_t*>(told_ + 2 * int64_t{runs_});
    ended_ = unsorted_ + 1;
    constexpr int64_t kScanned = 2;
    const int64_t counts = 3 * (int64_t{runs_} + 1) + TilesOf(keys) + tiles_ + 2 + kScanned;
    TF_RETURN_IF_ERROR(stream_->Scratch(keys * sizeof(int64_t) +
                                            (weighted ? keys : 0) * sizeof(float) +
                                            (3 * keys + 1 + counts) * sizeof(uint32_t),
                                        &room));
    samples_ = static_cast<int64_t*>(room);
    uint32_t* at = reinterpret_cast<uint32_t*>(samples_ + keys);
    const auto take = [&at](int64_t count) { return (at += count) - count; };
    weights_ = weighted ? reinterpret_cast<float*>(take(keys)) : nullptr;
    bags_ = take(keys);
    begins_ = take(keys + 1);
    begun_ = take(keys);
    starts_ = take(int64_t{runs_} + 1);
    first_bags_ = take(int64_t{runs_} + 1);
    places_ = take(int64_t{runs_} + 1);
    bag_counts_ = take(TilesOf(keys) + 1);
    begun_counts_ = take(tiles_ + 1);
    scanned_ = take(kScanned);
    return tensorflow::OkStatus();
  }

  // Turns the counts of tiles into sums of those before.
  tensorflow::Status Scan(uint32_t* counts, int64_t tiles, const uint32_t* section_tiles) {
    return ScanTiles(stream_, counts, tiles, 1, section_tiles, 0, told_, scanned_, ended_);
  }

  Stream* stream_;
  int64_t tiles_;
  int32_t members_;
  const int64_t *member_words_, *uploaded_, *kinds_;
  uint32_t runs_, sections_;
  int64_t* samples_ = nullptr;  // [K], as the following; of each key.
  float* weights_ = nullptr;
  uint32_t* bags_ = nullptr;
  uint32_t* begins_ = nullptr;  // [B + 1], the first key of each bag.
  uint32_t* begun_ = nullptr;   // Of each id, the bag that begins with it.
  uint32_t *starts_ = nullptr, *first_bags_ = nullptr, *places_ = nullptr;  // Of each run.
  uint32_t *bag_counts_ = nullptr, *begun_counts_ = nullptr;                // By tile.
  uint32_t *scanned_ = nullptr, *unsorted_ = nullptr, *ended_ = nullptr;
  int32_t* told_ = nullptr;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_ASK_BAGS_H_
