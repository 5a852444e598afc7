// De-duplicates keys by section and orders them by owner, with the kernels of distinct.cu, which
// ops/gpu/distinct.py describes. All keys of a section may also be kept.

#ifndef COLLECTIVE_NATIVE_GPU_DISTINCT_H_
#define COLLECTIVE_NATIVE_GPU_DISTINCT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "segments.h"
#include "stream.h"

namespace collective {
namespace gpu {

constexpr int64_t kTile = 2048;  // keys of a block, as in segments.cuh
constexpr int kWarps = kThreads / 32;
constexpr int kMostRanks = 48 * 1024 / (4 * kWarps);  // that shared memory has room for

inline int64_t TilesOf(int64_t keys) { return (keys + kTile - 1) / kTile; }

// Adjacent keys that belong to one section.
struct Segment {
  int64_t keys, section;
};

// Plans how blocks share keys: each takes a tile of one segment; tiles are numbered by section,
// then position.
class DistinctPlan {
 public:
  // As segments.cuh reads it.
  struct Words {
    int64_t tile;        // its first one
    int64_t first, end;  // of its keys
    int64_t section;
    int64_t kind;        // of its table
    int64_t slots;       // where its section's part of a scratch table begins
    int64_t slot_count;  // and how large that is; 0: all keys are kept
  };

  // Of each section, `kinds`: its table's; `kept`: whether all its keys are kept, each as often as
  // it comes (empty: of none).
  DistinctPlan(const std::vector<Segment>& segments, const std::vector<int>& kinds,
               const std::vector<bool>& kept = {})
      : section_tiles_(1, 0) {
    const size_t sections = kinds.size();
    std::vector<int64_t> first_of, keys_of(sections, 0);
    first_of.reserve(segments.size());
    for (const Segment& segment : segments) {
      first_of.push_back(keys_);
      keys_ += segment.keys;
      keys_of[segment.section] += segment.keys;
    }
    const Grouped by_section(segments.size(), sections, [&](size_t i) {
      return segments[i].keys > 0 ? segments[i].section : -1;
    });
    words_.reserve(segments.size());
    int64_t before = 0;
    for (size_t s = 0; s < sections; ++s) {
      const bool is_kept = !kept.empty() && kept[s];
      const int64_t slot_count = is_kept ? 0 : 2 * keys_of[s];
      for (const size_t* i = by_section.begin(s); i != by_section.end(s); ++i) {
        const int64_t first = first_of[*i], keys = segments[*i].keys;
        words_.push_back({tiles_, first, first + keys, static_cast<int64_t>(s), kinds[s],
                          2 * before, slot_count});
        tiles_ += TilesOf(keys);
      }
      section_tiles_.push_back(static_cast<uint32_t>(tiles_));
      if (!is_kept) before += keys_of[s];
    }
  }

  int64_t keys() const { return keys_; }
  int64_t tiles() const { return tiles_; }
  int32_t segments() const { return static_cast<int32_t>(words_.size()); }
  int64_t sections() const { return static_cast<int64_t>(section_tiles_.size()) - 1; }

  // Adds what kernels read to `words`; returns how many words that are.
  int64_t AppendTo(std::vector<int64_t>* words) const {
    const size_t before = words->size();
    for (const Words& of : words_) {
      words->insert(words->end(),
                    {of.tile, of.first, of.end, of.section, of.kind, of.slots, of.slot_count});
    }
    // Of 32 bits, two to a word.
    for (size_t s = 0; s < section_tiles_.size(); s += 2) {
      const uint64_t next = s + 1 < section_tiles_.size() ? section_tiles_[s + 1] : 0;
      words->push_back(static_cast<int64_t>(next << 32 | section_tiles_[s]));
    }
    return static_cast<int64_t>(words->size() - before);
  }

  // Returns where the first tile of each section is, and how many there are, if what kernels read
  // is at `words`.
  const uint32_t* SectionTiles(const int64_t* words) const {
    return reinterpret_cast<const uint32_t*>(words +
                                             words_.size() * sizeof(Words) / sizeof(int64_t));
  }

 private:
  std::vector<Words> words_;
  std::vector<uint32_t> section_tiles_;
  int64_t keys_ = 0, tiles_ = 0;
};

// What is distinct, on the device.
struct DistinctKeys {
  // The first U are defined: those of rank 0, then rank 1's, …; of one owner by section, of one
  // section by first appearance.
  int64_t* keys;
  int32_t* counts;    // [N, S]
  uint32_t* starts;   // [N + 1], the first of each rank, and U.
  uint32_t* firsts;   // [K], the position at which each key first appears.
  uint32_t* numbers;  // [K], at first positions the number of the key among the U.
};

// Turns the counts [N, tiles + 1] of each of `ranks` by tile into sums of those before, after
// which their sum is; `starts` [N + 1] become the sums over ranks. `ended` is 0. What each of
// `sections` has, [N, S], is left out where there are none.
inline tensorflow::Status ScanTiles(Stream* stream, uint32_t* counts, int64_t tiles, int ranks,
                                    const uint32_t* section_tiles, int64_t sections,
                                    int32_t* section_counts, uint32_t* starts, uint32_t* ended) {
  constexpr int64_t kMostThreads = 1024, kWarp = 32;
  const int64_t threads =
      std::min(kMostThreads, (std::max<int64_t>(tiles, 1) + kWarp - 1) / kWarp * kWarp);
  return stream->Launch(Kernel::kPartitionScan, Grid(ranks, static_cast<int>(threads)), counts,
                        static_cast<uint32_t>(tiles), section_tiles,
                        static_cast<uint32_t>(sections), section_counts, starts, ended);
}

// Launches the kernels. `keys` [K] are those that `plan` describes, which is at `words`.
inline tensorflow::Status LaunchDistinct(Stream* stream, const DistinctPlan& plan,
                                         const int64_t* words, int ranks, const int64_t* keys,
                                         DistinctKeys* distinct) {
  if (ranks > kMostRanks) {
    return tensorflow::errors::InvalidArgument("there are ", ranks, " ranks, but no more than ",
                                               kMostRanks, " can exchange keys of GPUs");
  }
  const int64_t size = plan.keys(), tiles = plan.tiles(), sections = plan.sections();
  const uint32_t rank_count = static_cast<uint32_t>(ranks), base = 1;
  const uint32_t tile_count = static_cast<uint32_t>(tiles);
  const int32_t segments = plan.segments();
  const uint32_t* section_tiles = plan.SectionTiles(words);
  // What of it must be 0 comes first. A part begins at a multiple of 8 bytes.
  void *zeros = nullptr, *memory = nullptr;
  TF_RETURN_IF_ERROR(stream->ZeroScratch(8 + 2 * size * sizeof(uint32_t), &zeros));
  uint32_t *ended = static_cast<uint32_t*>(zeros), *table = ended + 2;
  const int64_t by_tile = ranks * (tiles + 1);
  TF_RETURN_IF_ERROR(
      stream->Scratch(8 * size + 4 * (2 * size + by_tile + ranks + 1 + ranks * sections), &memory));
  distinct->keys = static_cast<int64_t*>(memory);
  distinct->firsts = reinterpret_cast<uint32_t*>(distinct->keys + size);
  distinct->numbers = distinct->firsts + size;
  uint32_t* counts = distinct->numbers + size;
  distinct->starts = counts + by_tile;
  distinct->counts = reinterpret_cast<int32_t*>(distinct->starts + ranks + 1);
  TF_RETURN_IF_ERROR(stream->Launch(Kernel::kDistinctInsert, tiles, keys, words, segments, table,
                                    base, distinct->firsts));
  TF_RETURN_IF_ERROR(stream->Launch(Kernel::kDistinctCount, Grid(tiles, kThreads, 4 * ranks), keys,
                                    words, segments, rank_count, counts, tile_count, table, base,
                                    distinct->firsts));
  TF_RETURN_IF_ERROR(ScanTiles(stream, counts, tiles, ranks, section_tiles, sections,
                               distinct->counts, distinct->starts, ended));
  return stream->Launch(Kernel::kDistinctNumber, Grid(tiles, kThreads, 4 * kWarps * ranks), keys,
                        words, segments, rank_count, counts, tile_count, distinct->starts,
                        distinct->firsts, distinct->numbers, distinct->keys);
}

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_DISTINCT_H_
