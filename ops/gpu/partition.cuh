// A stable partition by owner: how many keys of a tile go to each, then where each one goes.
//
// counts is [N, tiles + 1]. It holds counts, and after the scan the sums of those before; the last
// column is the sum of all.

#include "placement.cuh"
#include "segments.cuh"

constexpr u32 kNone = 0xFFFFFFFFu;

// The lanes whose key has the same owner; all lanes of the warp call it.
__device__ __forceinline__ u32 peers_of(u32 owner, u32 ranks) {
  return ranks == 1 ? __ballot_sync(kAllLanes, owner == 0) : __match_any_sync(kAllLanes, owner);
}

// The owner of a key of a tile.
struct ByOwner {
  int kind;
  u32 ranks;
  __device__ __forceinline__ u32 operator()(i64 key) const { return owner_of(key, kind, ranks); }
};

// Counts by owner(key) the keys for which `select(position)` holds. `counters` is shared memory for
// [N].
template <class Key, class Owner, class Select>
__device__ __forceinline__ void count_tile(const Tile& tile, const Key* keys, u32 ranks,
                                           Owner owner, u32* counts, u32 tiles, u32* counters,
                                           Select select) {
  for (u32 r = threadIdx.x; r < ranks; r += kThreads) counters[r] = 0;
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = tile.key(turn);
    const bool selected = at < tile.end && select(at);
    if (ranks == 1) {
      const u32 lanes = __ballot_sync(kAllLanes, selected);
      if (threadIdx.x % 32 == 0) atomicAdd(counters, static_cast<u32>(__popc(lanes)));
    } else if (selected) {
      atomicAdd(counters + owner(keys[at]), 1u);
    }
  }
  __syncthreads();
  for (u32 r = threadIdx.x; r < ranks; r += kThreads)
    counts[static_cast<i64>(r) * (tiles + 1) + tile.index] = counters[r];
}

// Calls place(position, key, number) for each selected key, where numbers go by owner, then tile,
// then position. `counters` is shared memory for [kWarps, N].
template <class Key, class Owner, class Select, class Place>
__device__ __forceinline__ void place_tile(const Tile& tile, const Key* keys, u32 ranks,
                                           Owner owner, const u32* counts, u32 tiles,
                                           const u32* starts, u32* counters, Select select,
                                           Place place) {
  for (u32 c = threadIdx.x; c < kWarps * ranks; c += kThreads) counters[c] = 0;
  __syncthreads();
  const u32 lane = threadIdx.x % 32;
  u32* mine = counters + threadIdx.x / 32 * ranks;
  Key held[kTurns];
  u32 owners[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = tile.key(turn);
    owners[turn] = kNone;
    if (at < tile.end && select(at)) {
      held[turn] = keys[at];
      owners[turn] = owner(held[turn]);
    }
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const u32 of_key = owners[turn], peers = peers_of(of_key, ranks);
    if (of_key != kNone && (peers & ((1u << lane) - 1)) == 0) mine[of_key] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
  for (u32 r = threadIdx.x; r < ranks; r += kThreads) {
    u32 sum = starts[r] + counts[static_cast<i64>(r) * (tiles + 1) + tile.index];
    for (int warp = 0; warp < kWarps; ++warp) {
      const u32 here = counters[warp * ranks + r];
      counters[warp * ranks + r] = sum;
      sum += here;
    }
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const u32 of_key = owners[turn], peers = peers_of(of_key, ranks),
              before = peers & ((1u << lane) - 1);
    if (of_key != kNone) place(tile.key(turn), held[turn], mine[of_key] + __popc(before));
    __syncwarp();
    if (of_key != kNone && before == 0) mine[of_key] += __popc(peers);
    __syncwarp();
  }
}
