// Sums what occurs of each row, by the kernels of sums.cu: the gradients of rows. Always in the
// same order.

#ifndef COLLECTIVE_NATIVE_GPU_SUMS_H_
#define COLLECTIVE_NATIVE_GPU_SUMS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "occurrences.h"
#include "segments.h"
#include "stream.h"
#include "targets.h"

namespace collective {
namespace gpu {

constexpr int64_t kSumsInFlight = 4;  // of a group, as in sums.cu

// Returns the target of `count` sums. `own`: address of the rows themselves, to which a part of the
// gradients is along; or 0.
inline TargetWords TargetOfSums(int64_t count, int64_t dim, int64_t out, int64_t own) {
  TargetWords words{};
  words.dim = dim;
  words.values = out;
  words.count = count;
  words.slots[0] = own;
  return words;
}

// What is summed: a row of `gradients` for each occurrence, and where the sums go.
class RowSums {
 public:
  // Takes room for partial sums, and packs what kernels read. `known`: where rows of some targets
  // are among the `gradients`, in the order of the targets.
  tensorflow::Status Pack(Stream* stream, const Targets& targets, const Runs& gradients,
                          const Occurrences& occurrences, Packed* packed,
                          const std::vector<RunsOfTarget>& known = {}) {
    const int64_t most = occurrences.most_pieces();
    tiles_ = targets.tiles();
    target_count_ = targets.count();
    width_ = targets.width();
    TF_RETURN_IF_ERROR(stream->Scratch(most * width_ * kFloatBytes, &partials_));
    TF_RETURN_IF_ERROR(stream->Scratch(most * kFloatBytes, &partial_along_));
    std::vector<RunWords> runs = gradients.entries();
    run_count_ = static_cast<int32_t>(runs.size());
    runs.push_back({0, most, AddressOf(static_cast<char*>(partials_))});
    runs_at_ = packed->Add(runs);
    targets_at_ = packed->Add(targets.Of(run_count_, known));
    return tensorflow::OkStatus();
  }

  // Sums what occurs of rows of which much does, in pieces.
  //
  // Args:
  //   rows: for each target the address of the numbers of its rows; null: they are in order.
  //   terms, along: of each occurrence, or null; no terms if `occurrences` has them in its order.
  tensorflow::Status Start(Stream* stream, const Occurrences& occurrences, const int64_t* rows,
                           const void* terms, const void* along, const int64_t* uploaded) {
    // Blocks take turns; as many as a large GPU has room for.
    constexpr int64_t kMostPieceBlocks = 1024, kMostLongBlocks = 256;
    occurrences_ = &occurrences;
    rows_ = rows;
    terms_ = occurrences.terms != nullptr ? occurrences.terms : terms;
    along_ = along;
    uploaded_ = uploaded;
    const int64_t pieces = tiles_ == 0 ? 0 : occurrences.most_pieces(),
                  longs = tiles_ == 0 ? 0 : occurrences.most_longs();
    long_blocks_ = std::min(kMostLongBlocks, longs);
    return LaunchBy(stream, Kernel::kSumPieces, std::min(kMostPieceBlocks, pieces), nullptr,
                    occurrences.pieces, partials_, partial_along_);
  }

  // Launches what takes the sums of other rows; `rest`: its arguments besides.
  template <class... Rest>
  tensorflow::Status Launch(Stream* stream, Kernel kernel, Rest... rest) const {
    return LaunchBy(stream, kernel, tiles_, nullptr, rest...);
  }

  // Launches what takes the sums of rows of which much occurs.
  template <class... Rest>
  tensorflow::Status LaunchLong(Stream* stream, Kernel kernel, Rest... rest) const {
    return LaunchBy(stream, kernel, long_blocks_, occurrences_->longs, rest...);
  }

 private:
  template <class... Rest>
  tensorflow::Status LaunchBy(Stream* stream, Kernel kernel, int64_t blocks, const void* longs,
                              Rest... rest) const {
    return stream->Launch(kernel, Grid(blocks), uploaded_ + targets_at_, target_count_,
                          occurrences_->offsets, rows_, occurrences_->counters, longs, along_,
                          partial_along_, width_, occurrences_->order, terms_, uploaded_ + runs_at_,
                          run_count_, rest...);
  }

  const Occurrences* occurrences_ = nullptr;
  const int64_t *rows_ = nullptr, *uploaded_ = nullptr;
  const void *terms_ = nullptr, *along_ = nullptr;
  int64_t tiles_ = 0, width_ = 0, long_blocks_ = 0;
  int32_t target_count_ = 0, run_count_ = 0;
  void *partials_ = nullptr, *partial_along_ = nullptr;
  size_t runs_at_ = 0, targets_at_ = 0;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_SUMS_H_
