// Occurrences ordered by row. occurrences.py describes and launches these kernels.
//
// A sort by counting, one digit of the row numbers at a time, lowest first: each pass keeps the
// order of the one before.

#include "occurrences.cuh"
#include "scans.cuh"
#include "segments.cuh"

constexpr int kSortTurns = 16;
constexpr int kSortTile = kThreads * kSortTurns;  // keys of a block
constexpr u32 kNoDigit = 0xFFFFFFFFu;

struct ByDigit {
  u32 shift, mask;
  __device__ __forceinline__ u32 operator()(u32 row) const { return row >> shift & mask; }
};

// counts[d, tile], of [digits, tiles + 1]: how many keys of a tile have the digit d.
extern "C" __global__ void __launch_bounds__(kThreads)
    occurrences_count(const u32* __restrict__ rows, i64 count, u32 shift, u32 digits,
                      u32* __restrict__ counts, u32 tiles) {
  extern __shared__ u32 counters[];
  const ByDigit digit_of = {shift, digits - 1};
  for (u32 d = threadIdx.x; d < digits; d += kThreads) counters[d] = 0;
  __syncthreads();
  const i64 first = static_cast<i64>(blockIdx.x) * kSortTile + threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < kSortTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    if (at < count) atomicAdd(counters + digit_of(rows[at]), 1u);
  }
  __syncthreads();
  for (u32 d = threadIdx.x; d < digits; d += kThreads)
    counts[static_cast<i64>(d) * (tiles + 1) + blockIdx.x] = counters[d];
}

// Has each warp rank its keys among those with the same digit: `ranks` within the warp, whose
// counts are `mine`. A thread's keys are in the order of its turns; it has `left` of them.
__device__ __forceinline__ void rank_keys(const u32 (&keys)[kSortTurns], int left, ByDigit digit_of,
                                          unsigned short* mine, u32 (&ranks)[kSortTurns]) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int turn = 0; turn < kSortTurns; ++turn) {
    const u32 digit = turn < left ? digit_of(keys[turn]) : kNoDigit,
              peers = __match_any_sync(kAllLanes, digit);
    const int leader = __ffs(static_cast<int>(peers)) - 1;
    u32 before = 0;
    if (static_cast<int>(lane) == leader && digit != kNoDigit) {
      before = mine[digit];
      mine[digit] = static_cast<unsigned short>(before + __popc(peers));
    }
    ranks[turn] = __shfl_sync(kAllLanes, before, leader) + __popc(peers & ((1u << lane) - 1));
    __syncwarp();
  }
}

// Moves each key of a tile to its place: they are ordered in shared memory first, so that those of
// a digit, which lie side by side, are written together. `counts` and `starts` are what
// partition_scan makes of the counts: the sums over tiles before, and over digits before. `order`
// is null in the first pass. In the last one, `terms` of 8 bytes may go to the places of their
// occurrences: who reads them later reads what lies side by side. `placed` is the occurrences
// there, or their terms if there are any. Shared memory is for 2 kSortTile + digits numbers, and
// kWarps digits of 16 bits.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    occurrences_place(const u32* __restrict__ rows, const u32* __restrict__ order, i64 count,
                      u32 shift, u32 digits, const u32* __restrict__ counts, u32 tiles,
                      const u32* __restrict__ starts, const u64* __restrict__ terms,
                      u32* __restrict__ placed_rows, void* __restrict__ placed) {
  extern __shared__ u32 shared[];
  __shared__ u32 sums[33];
  constexpr u32 kEach = 2;  // digits of a thread, at most
  u32 *const keys = shared, *const orders = keys + kSortTile, *const bases = orders + kSortTile;
  unsigned short* const counters = reinterpret_cast<unsigned short*>(bases + digits);
  const ByDigit digit_of = {shift, digits - 1};
  for (u32 c = threadIdx.x; c < kWarps * digits; c += kThreads) counters[c] = 0;

  // 1. Rank keys within their warps.
  const i64 tile = static_cast<i64>(blockIdx.x) * kSortTile,
            first = tile + threadIdx.x / 32 * (32 * kSortTurns) + threadIdx.x % 32;
  unsigned short* const mine = counters + threadIdx.x / 32 * digits;
  const i64 remaining = count - first;
  const int left =
      remaining < 32 * kSortTurns ? static_cast<int>((remaining + 31) / 32) : kSortTurns;
  u32 held[kSortTurns], ranks[kSortTurns];
#pragma unroll
  for (int turn = 0; turn < kSortTurns; ++turn)
    held[turn] = turn < left ? rows[first + turn * 32] : 0;
  __syncthreads();
  rank_keys(held, left, digit_of, mine, ranks);
  __syncthreads();

  // 2. Sum over warps, and over digits.
  u32 totals[kEach], all, of_thread = 0;
#pragma unroll
  for (u32 i = 0; i < kEach; ++i) {
    const u32 d = threadIdx.x * kEach + i;
    totals[i] = 0;
    if (d >= digits) continue;
    for (int warp = 0; warp < kWarps; ++warp) {
      const u32 here = counters[warp * digits + d];
      counters[warp * digits + d] = static_cast<unsigned short>(totals[i]);
      totals[i] += here;
    }
    of_thread += totals[i];
  }
  u32 before = exclusive_sum(of_thread, sums, &all);
#pragma unroll
  for (u32 i = 0; i < kEach; ++i) {
    const u32 d = threadIdx.x * kEach + i;
    if (d >= digits) continue;
    for (int warp = 0; warp < kWarps; ++warp)
      counters[warp * digits + d] =
          static_cast<unsigned short>(counters[warp * digits + d] + before);
    bases[d] = starts[d] + counts[static_cast<i64>(d) * (tiles + 1) + blockIdx.x] - before;
    before += totals[i];
  }
  __syncthreads();

  // 3. Order them here, then write them.
#pragma unroll
  for (int turn = 0; turn < kSortTurns; ++turn) {
    if (turn >= left) continue;
    const i64 at = first + turn * 32;
    const u32 place = mine[digit_of(held[turn])] + ranks[turn];
    keys[place] = held[turn];
    orders[place] = order == nullptr ? static_cast<u32>(at) : order[at];
  }
  __syncthreads();
  const u32 here = static_cast<u32>(count - tile < kSortTile ? count - tile : kSortTile);
#pragma unroll 4
  for (u32 place = threadIdx.x; place < here; place += kThreads) {
    const u32 row = keys[place], to = bases[digit_of(row)] + place;
    placed_rows[to] = row;
    if (terms == nullptr) {
      static_cast<u32*>(placed)[to] = orders[place];
    } else {
      static_cast<u64*>(placed)[to] = __ldg(terms + orders[place]);
    }
  }
}

// offsets[r]: the first of the ascending `rows` that is r or more. `counters` become 0.
//
// Each thread writes those from the row before its own up to its own; a warp together where that
// are many. Of kThreads rows side by side that are all among those, beginning with a multiple, it
// writes the first only, and sets their mark; so occurrences_split has a block of its own for them.
extern "C" __global__ void __launch_bounds__(kThreads)
    occurrences_offsets(const u32* __restrict__ rows, i64 count, u32 row_count,
                        int* __restrict__ offsets, u32* counters,
                        unsigned char* __restrict__ marks) {
  const auto write = [offsets, marks](u32 row, int place) {
    offsets[row] = place;
    if (row % kThreads == 0) marks[row / kThreads] = 0;
  };
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
    for (u32 row = begin; !together && row < end; ++row) write(row, static_cast<int>(at));
    for (u32 lanes = __ballot_sync(kAllLanes, together); lanes != 0; lanes &= lanes - 1) {
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      const u32 from = __shfl_sync(kAllLanes, begin, lane), to = __shfl_sync(kAllLanes, end, lane),
                own = threadIdx.x % 32;
      const int place = static_cast<int>(at) - static_cast<int>(own) + lane;
      // Whole tiles, all of whose rows are empty: not the last row.
      const u32 tile = (from + kThreads - 1) / kThreads, tile_end = max(tile, (to - 1) / kThreads);
      for (u32 row = from + own; row < min(tile * kThreads, to); row += 32) write(row, place);
      for (u32 t = tile + own; t < tile_end; t += 32) {
        offsets[t * kThreads] = place;
        marks[t] = 1;
      }
      for (u32 row = tile_end * kThreads + own; row < to; row += 32) write(row, place);
    }
  }
}

// Lists the rows with many occurrences, and cuts these in pieces. In any order: nothing depends on
// it. Writes the offsets of rows that are marked.
extern "C" __global__ void __launch_bounds__(kThreads)
    occurrences_split(int* __restrict__ offsets, i64 row_count, u32* counters,
                      Long* __restrict__ longs, Piece* __restrict__ pieces,
                      const unsigned char* __restrict__ marks) {
  const i64 first_row = static_cast<i64>(blockIdx.x) * kThreads, row = first_row + threadIdx.x;
  if (marks[blockIdx.x] != 0) {
    const int place = offsets[first_row];
    if (threadIdx.x > 0) offsets[row] = place;
    return;
  }
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
