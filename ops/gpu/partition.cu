// Keys ordered by owner, without de-duplication; and the scan that others need, too. partition.py
// describes and launches them.

#include "partition.cuh"
#include "scans.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    partition_count(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                    int segment_count, u32 ranks, u32* __restrict__ counts, u32 tiles) {
  extern __shared__ u32 counters[];
  const Tile tile(segments, segment_count);
  count_tile(tile, keys, ranks, ByOwner{tile.kind, ranks}, counts, tiles, counters,
             [](i64) { return true; });
}

// One block for each owner: the sums over its tiles, and what each section has. The block that ends
// last sums over owners. `ended` is 0, and is so again afterwards.
extern "C" __global__ void __launch_bounds__(1024)
    partition_scan(u32* counts, u32 tiles, const u32* __restrict__ section_tiles, u32 sections,
                   int* __restrict__ section_counts, u32* starts, u32* ended) {
  __shared__ u32 sums[33];
  __shared__ bool last;
  const u32 owner = blockIdx.x, ranks = gridDim.x;
  u32* mine = counts + static_cast<i64>(owner) * (tiles + 1);
  u32 before = 0;
  for (u32 first = 0; first < tiles; first += blockDim.x) {
    const u32 tile = first + threadIdx.x;
    u32 total;
    const u32 sum = exclusive_sum(tile < tiles ? mine[tile] : 0, sums, &total);
    if (tile < tiles) mine[tile] = before + sum;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) mine[tiles] = before;
  __threadfence();
  __syncthreads();
  for (u32 s = threadIdx.x; s < sections; s += blockDim.x) {
    section_counts[static_cast<i64>(owner) * sections + s] =
        static_cast<int>(mine[section_tiles[s + 1]] - mine[section_tiles[s]]);
  }
  if (threadIdx.x == 0) last = atomicAdd(ended, 1u) == ranks - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  before = 0;
  for (u32 first = 0; first < ranks; first += blockDim.x) {
    const u32 r = first + threadIdx.x;
    u32 total;
    const u32 sum = exclusive_sum(
        r < ranks ? __ldcg(counts + static_cast<i64>(r) * (tiles + 1) + tiles) : 0, sums, &total);
    if (r < ranks) starts[r] = before + sum;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    starts[ranks] = before;
    *ended = 0;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    partition_scatter(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                      int segment_count, u32 ranks, const u32* __restrict__ counts, u32 tiles,
                      const u32* __restrict__ starts, i64* __restrict__ ordered,
                      int* __restrict__ positions) {
  extern __shared__ u32 counters[];
  const Tile tile(segments, segment_count);
  place_tile(
      tile, keys, ranks, ByOwner{tile.kind, ranks}, counts, tiles, starts, counters,
      [](i64) { return true; },
      [=](i64 at, i64 key, u32 number) {
        ordered[number] = key;
        positions[at] = static_cast<int>(number);
      });
}

// Keys of one table that one rank sent.
struct Keys {
  i64 tile;        // its first one
  i64 keys, rows;  // addresses
  i64 count;
  i64 kind;  // of its table
};

extern "C" __global__ void __launch_bounds__(kThreads)
    local_rows(const Keys* __restrict__ pieces, int count, u32 ranks) {
  const Keys piece = holding(pieces, count, blockIdx.x);
  const i64* keys = reinterpret_cast<const i64*>(piece.keys);
  i64* rows = reinterpret_cast<i64*>(piece.rows);
  const i64 first = (blockIdx.x - piece.tile) * kTile + threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    if (at < piece.count) rows[at] = local_row_of(keys[at], static_cast<int>(piece.kind), ranks);
  }
}
