// Occurrences ordered by row. occurrences.py describes and launches these kernels.
//
// A sort by counting, one digit of the row numbers at a time, lowest first: each pass keeps the
// order of the one before.

#include "occurrences.cuh"
#include "partition.cuh"

struct ByDigit {
  u32 shift, mask;
  __device__ __forceinline__ u32 operator()(u32 row) const { return row >> shift & mask; }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    occurrences_count(const u32* __restrict__ rows, const Segment* __restrict__ segments,
                      int segment_count, u32 shift, u32 digits, u32* __restrict__ counts,
                      u32 tiles) {
  extern __shared__ u32 counters[];
  count_tile(Tile(segments, segment_count), rows, digits, ByDigit{shift, digits - 1}, counts, tiles,
             counters, [](i64) { return true; });
}

// `order` is null in the first pass.
extern "C" __global__ void __launch_bounds__(kThreads)
    occurrences_place(const u32* __restrict__ rows, const u32* __restrict__ order,
                      const Segment* __restrict__ segments, int segment_count, u32 shift,
                      u32 digits, const u32* __restrict__ counts, u32 tiles,
                      const u32* __restrict__ starts, u32* __restrict__ placed_rows,
                      u32* __restrict__ placed_order) {
  extern __shared__ u32 counters[];
  place_tile(
      Tile(segments, segment_count), rows, digits, ByDigit{shift, digits - 1}, counts, tiles,
      starts, counters, [](i64) { return true; },
      [=](i64 at, u32 row, u32 number) {
        placed_rows[number] = row;
        placed_order[number] = order == nullptr ? static_cast<u32>(at) : order[at];
      });
}

// offsets[r]: the first of the ascending `rows` that is r or more. `counters` become 0.
//
// Each thread writes those from the row before its own up to its own; a warp together where that
// are many.
extern "C" __global__ void __launch_bounds__(kThreads)
    occurrences_offsets(const u32* __restrict__ rows, i64 count, u32 row_count,
                        int* __restrict__ offsets, u32* counters) {
  if (blockIdx.x == 0 && threadIdx.x < 2) counters[threadIdx.x] = 0;
  const i64 first = static_cast<i64>(blockIdx.x) * kTile + threadIdx.x;
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    u32 begin = 0, end = 0;
    if (at <= count) {
      begin = at == 0 ? 0 : rows[at - 1] + 1;
      end = (at == count ? row_count : rows[at]) + 1;
    }
    const bool together = end > begin + kEmpty;
    for (u32 row = begin; !together && row < end; ++row) offsets[row] = static_cast<int>(at);
    for (u32 lanes = __ballot_sync(kAllLanes, together); lanes != 0; lanes &= lanes - 1) {
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      const u32 to = __shfl_sync(kAllLanes, end, lane);
      const int place = static_cast<int>(at) - static_cast<int>(threadIdx.x % 32) + lane;
      for (u32 row = __shfl_sync(kAllLanes, begin, lane) + threadIdx.x % 32; row < to; row += 32)
        offsets[row] = place;
    }
  }
}

// Lists the rows with many occurrences, and cuts these in pieces. In any order: nothing depends on
// it.
extern "C" __global__ void __launch_bounds__(kThreads)
    occurrences_split(const int* __restrict__ offsets, i64 row_count, u32* counters,
                      Long* __restrict__ longs, Piece* __restrict__ pieces) {
  const i64 row = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= row_count) return;
  const u32 begin = static_cast<u32>(offsets[row]), end = static_cast<u32>(offsets[row + 1]);
  if (end - begin <= kLong) return;
  const u32 count = (end - begin + kPiece - 1) / kPiece, first = atomicAdd(counters + 1, count);
  longs[atomicAdd(counters, 1u)] = {static_cast<u32>(row), first, count};
  for (u32 p = 0; p < count; ++p) {
    const u32 from = begin + p * kPiece;
    pieces[first + p] = {static_cast<u32>(row), from, from + kPiece < end ? from + kPiece : end};
  }
}
