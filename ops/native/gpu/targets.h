// Describes to kernels the rows that gradients are summed for.

#ifndef COLLECTIVE_NATIVE_GPU_TARGETS_H_
#define COLLECTIVE_NATIVE_GPU_TARGETS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "segments.h"
#include "stream.h"

namespace collective {
namespace gpu {

constexpr int kMostSlots = 3;  // as in targets.cuh

// As targets.cuh reads it.
struct TargetWords {
  int64_t tile;        // its first one
  int64_t first, end;  // of its rows, among those of all targets
  int64_t dim;
  int64_t lanes;   // of a group
  int64_t values;  // address: of the table, or of what is written
  int64_t count;   // of its rows
  int64_t slots[kMostSlots];
  int64_t touched;
  int64_t run, runs;  // where the rows that are summed for it are, among all runs
};

// Where all rows are that are summed for the target whose first row is `first`.
struct RunsOfTarget {
  int64_t first;
  int64_t run, runs;
};

// Shares rows out to blocks, target by target.
class Targets {
 public:
  // Args:
  //   flight: rows that one group of threads has at once.
  explicit Targets(int64_t flight) : flight_(flight) {}

  // Adds `count` rows, which follow those before. `words` says what a target has in addition to
  // numbers.
  void Add(int64_t count, TargetWords words) {
    words.first = rows_;
    words.end = rows_ += count;
    words.lanes = GroupLanes(words.dim);
    if (count > 0) width_ = std::max(width_, CeilOfQuotient(words.dim, 4) * 4);
    tiled_.Add(words, CeilOfQuotient(count, kThreads / words.lanes * flight_));
  }

  const Tiled<TargetWords>& tiled() const { return tiled_; }
  // Returns the targets for sums of rows in `runs` runs: of a target in any of them, unless it is
  // among those `known`.
  std::vector<TargetWords> Of(int64_t runs, const std::vector<RunsOfTarget>& known = {}) const {
    std::vector<TargetWords> entries = tiled_.entries();
    auto one = known.begin();
    for (TargetWords& words : entries) {
      words.runs = runs;
      while (one != known.end() && one->first < words.first) ++one;
      if (one == known.end() || one->first > words.first) continue;
      words.run = one->run;
      words.runs = one->runs;
    }
    return entries;
  }
  int32_t count() const { return tiled_.count(); }
  int64_t tiles() const { return tiled_.tiles(); }
  int64_t rows() const { return rows_; }
  // Elements of the longest row, in whole accesses.
  int64_t width() const { return width_; }

 private:
  int64_t flight_;
  Tiled<TargetWords> tiled_;
  int64_t rows_ = 0, width_ = 0;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_TARGETS_H_
