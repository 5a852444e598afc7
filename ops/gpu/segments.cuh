// Segments of keys, and the tile of one that a block works on. `plan` in segments.py writes them.

#include "integers.cuh"

struct Segment {
  i64 tile;        // its first one
  i64 first, end;  // of its keys
  i64 section;
  i64 kind;        // of its table
  i64 slots;       // where its section's part of a scratch table begins
  i64 slot_count;  // and how large that is; 0: its keys are not de-duplicated
};

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTurns = 8;
constexpr int kTile = kThreads * kTurns;

// The last of `count` things that begin at or before `tile`; the first begins at 0.
template <class T>
__device__ __forceinline__ const T& holding(const T* things, int count, i64 tile) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (things[middle].tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return things[low];
}

// Calls use(thing, i) for each i of a block's tile of a thing that has `count`.
template <class T, class Use>
__device__ __forceinline__ void for_tile(const T* things, int count, Use use) {
  const T thing = holding(things, count, blockIdx.x);
  const i64 first = (blockIdx.x - thing.tile) * kTile + threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    if (at < thing.count) use(thing, at);
  }
}

struct Tile {
  i64 first, end;
  u32 index;
  int kind;
  u32 slots, slot_count;

  __device__ __forceinline__ Tile(const Segment* segments, int count) {
    index = blockIdx.x;
    const Segment& segment = holding(segments, count, index);
    first = segment.first + (index - segment.tile) * kTile;
    end = first + kTile < segment.end ? first + kTile : segment.end;
    kind = static_cast<int>(segment.kind);
    slots = static_cast<u32>(segment.slots);
    slot_count = static_cast<u32>(segment.slot_count);
  }

  // The key that a thread has in each of its turns. Those of a warp lie side by side, so that ranks
  // can follow positions.
  __device__ __forceinline__ i64 key(int turn) const {
    return first + threadIdx.x / 32 * (32 * kTurns) + turn * 32 + threadIdx.x % 32;
  }
};
