// Describes the bags of a received message as lookups for the kernels of pool.cu. A kernel of
// bags.cu computes where each bag begins from the lengths in the message.

#ifndef COLLECTIVE_NATIVE_GPU_BAGS_H_
#define COLLECTIVE_NATIVE_GPU_BAGS_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../variables.h"
#include "../wire.h"
#include "pooling.h"
#include "segments.h"
#include "stream.h"

namespace collective {
namespace gpu {

// As bags.cu reads it.
struct BagWords {
  int64_t tile;        // the number of its block
  int64_t first, end;  // of its bags
  int64_t id, ids;     // the first of all, and how many
  int64_t lengths;     // address; 0: each id is a bag of its own
};

// Lookups among what was packed.
struct PackedLookups {
  size_t at;
  int32_t count;
  int64_t tiles;
};

// The bags of pieces, numbered as they are added, and so are their ids: the keys.
//
// `Number` is the type of row numbers.
template <class Number>
class Bags {
 public:
  explicit Bags(const std::vector<Table>& tables) : tables_(tables) {}

  // Adds the bags of `piece`, whose keys have the row `numbers` of a table; in an unpooled section
  // each bag has one key. Their rows go to `out`, an address.
  tensorflow::Status Add(const Section& section, const Piece& piece, const Number* numbers,
                         int64_t table, int64_t out) {
    if (piece.bags == 0 && piece.keys > 0) {
      return tensorflow::errors::InvalidArgument("a message is malformed: section ", piece.section,
                                                 " has no bags, but ", piece.keys, " keys");
    }
    PooledLookup lookup;
    lookup.first = bags_;
    lookup.samples = piece.bags;
    lookup.dim = section.dim;
    lookup.weighted = section.weighted;
    lookup.max_norm = section.max_norm;
    lookup.run = table;
    lookup.runs = 1;
    lookup.positions = AddressOf(numbers) - keys_ * static_cast<int64_t>(sizeof(Number));
    if (section.weighted) lookup.weights = AddressOf(piece.weights) - keys_ * kFloatBytes;
    lookups_.push_back(lookup);
    out_.push_back(out);
    words_.Add({0, bags_, bags_ + piece.bags, keys_, piece.keys, AddressOf(piece.lengths)},
               piece.bags > 0 ? 1 : 0);
    bags_ += piece.bags;
    keys_ += piece.keys;
    longest_ = std::max(longest_, piece.bags);
    clips_ |= section.max_norm > 0;
    return tensorflow::OkStatus();
  }

  int64_t count() const { return bags_; }
  int64_t keys() const { return keys_; }
  bool clips() const { return clips_; }

  // Tells whether rows are used unchanged, by whole accesses: then the faster kernel can be used.
  bool IsPlain() const {
    constexpr int64_t kWidthOfAccess = 4, kAccessBytes = kWidthOfAccess * kFloatBytes;
    for (size_t i = 0; i < lookups_.size(); ++i) {
      const PooledLookup& lookup = lookups_[i];
      if (lookup.samples == 0) continue;
      if (lookup.weighted || lookup.max_norm > 0 || lookup.dim % kWidthOfAccess != 0 ||
          (out_[i] | AddressOf(tables_[lookup.run].values)) % kAccessBytes != 0)
        return false;
    }
    return true;
  }

  // Packs the words that all kernels read.
  void Pack(Packed* packed) {
    bags_at_ = packed->Add(words_);
    std::vector<RunWords> runs;
    for (const Table& table : tables_) runs.push_back({0, table.rows, AddressOf(table.values)});
    runs_at_ = packed->Add(runs);
    if (clips_) by_bag_ = PackLookups(0, Samples::kOne, packed);
  }

  // Packs lookups of which a group of `lanes` (0: by the dimension) works on bags `of_group`.
  PackedLookups PackLookups(int64_t lanes, Samples of_group, Packed* packed) const {
    Tiled<LookupWords> tiled;
    for (size_t i = 0; i < lookups_.size(); ++i) {
      const PooledLookup& lookup = lookups_[i];
      AddLookup(lookup, lanes == 0 ? GroupLanes(lookup.dim) : lanes, of_group, out_[i], &tiled);
    }
    return {packed->Add(tiled), tiled.count(), tiled.tiles()};
  }

  // Finds where bags begin. What was packed is `there`.
  //
  // Args:
  //   wrong: an int32 on the device that becomes 1 if the lengths of a piece's bags don't add up to
  //     its keys. Then nothing but these keys is read or written. Null if not needed.
  tensorflow::Status FindOffsets(Stream* stream, const int64_t* there, void* wrong) {
    constexpr int64_t kMostThreads = 1024, kLengthsOfThread = 4;  // as in bags.cu
    TF_RETURN_IF_ERROR(stream->Scratch((bags_ + 1) * sizeof(int32_t), &offsets_));
    const int64_t warps = CeilOfQuotient(longest_, kLengthsOfThread * kLanesOfWarp);
    const int64_t threads = std::min(kMostThreads, kLanesOfWarp * std::max<int64_t>(warps, 1));
    return stream->Launch(Kernel::kBagOffsets, Grid(words_.tiles(), static_cast<int>(threads)),
                          there + bags_at_, offsets_, wrong);
  }

  // Finds the squares of the norms of the keys' rows, if a piece has a max_norm.
  tensorflow::Status Square(Stream* stream, const int64_t* there) {
    if (!clips_) return tensorflow::OkStatus();
    TF_RETURN_IF_ERROR(stream->Scratch(keys_ * kFloatBytes, &squares_));
    return Multiply(stream, there, nullptr, 0, squares_);
  }

  // Multiplies each key's row by itself, or by the gradient of its bag if there are any.
  tensorflow::Status Multiply(Stream* stream, const int64_t* there, const int64_t* gradients,
                              int32_t gradient_count, void* products) const {
    const void* none = nullptr;
    return stream->Launch(Kernel::kPoolProducts, by_bag_.tiles, there + by_bag_.at, by_bag_.count,
                          kIsWide, offsets_, none, runs(there), gradients, gradient_count,
                          products);
  }

  // Launches a kernel for lookups; `rest` are its other arguments.
  template <class... Rest>
  tensorflow::Status Launch(Stream* stream, Kernel kernel, const PackedLookups& lookups,
                            const int64_t* there, Rest... rest) const {
    return stream->Launch(kernel, lookups.tiles, there + lookups.at, lookups.count, kIsWide,
                          offsets_, squares_, rest...);
  }

  // The rows of the tables, a run each.
  const int64_t* runs(const int64_t* there) const { return there + runs_at_; }

 private:
  static constexpr int32_t kIsWide = std::is_same<Number, int64_t>::value;

  const std::vector<Table>& tables_;
  std::vector<PooledLookup> lookups_;
  std::vector<int64_t> out_;
  Tiled<BagWords> words_;
  int64_t bags_ = 0, keys_ = 0, longest_ = 0;
  bool clips_ = false;
  void *offsets_ = nullptr, *squares_ = nullptr;
  size_t bags_at_ = 0, runs_at_ = 0;
  PackedLookups by_bag_{0, 0, 0};
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_BAGS_H_
