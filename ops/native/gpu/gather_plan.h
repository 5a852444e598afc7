// Plans which rows the kernels of gather.cu copy.

#ifndef COLLECTIVE_NATIVE_GPU_GATHER_PLAN_H_
#define COLLECTIVE_NATIVE_GPU_GATHER_PLAN_H_

#include <algorithm>
#include <cstdint>

#include "../variables.h"
#include "segments.h"
#include "stream.h"

namespace collective {
namespace gpu {

// As gather.cu reads it.
struct PieceWords {
  int64_t tile;  // its first one
  int64_t rows, count;
  int64_t table, table_rows;
  int64_t dim;
  int64_t out;      // element
  int64_t lanes;    // of a group
  int64_t vectors;  // whether all addresses allow accesses of four elements
};

// Plans how blocks share the rows of pieces.
class GatherPlan {
 public:
  // Adds `count` rows of `table`, whose numbers are at `rows`; they go to the element `out` on.
  template <class Number>
  void Add(const Number* rows, int64_t count, const Table& table, int64_t out) {
    constexpr int64_t kWidth = 4, kFlight = 4, kRounds = 2;  // as in gather.cu
    const int64_t address = AddressOf(table.values);
    // The result itself is aligned, as all tensors are.
    const bool vectors =
        table.dim % kWidth == 0 && address % (kWidth * kFloatBytes) == 0 && out % kWidth == 0;
    const int64_t accesses = vectors ? table.dim / kWidth : table.dim;
    int64_t lanes = 1;
    while (lanes < std::min(accesses, kLanesOfWarp)) lanes *= 2;
    pieces_.Add({0, AddressOf(rows), count, address, table.rows, table.dim, out, lanes, vectors},
                CeilOfQuotient(count, kThreads / lanes * kFlight * kRounds));
  }

  const Tiled<PieceWords>& pieces() const { return pieces_; }

 private:
  Tiled<PieceWords> pieces_;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_GATHER_PLAN_H_
