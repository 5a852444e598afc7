// Distinct keys by owner. distinct.py describes and launches these kernels.
//
// The scratch table has 32-bit words: base + the position of a key. A word below `base` is of an
// earlier call, and free: the table is never cleared. Each section has a part of its own with two
// words for each key, so that only keys of one section meet, and there is always a free word. The
// key itself is read at its position: any value of a key is valid.

#include "partition.cuh"

constexpr int kFlight = 4;  // keys of a thread whose words are fetched at once

__device__ __forceinline__ u32 fetch(const u32* word) {
  return *static_cast<const volatile u32*>(word);
}

// slots[i]: the word that key i found or took; it comes to hold the first position of that key. If
// keys are not de-duplicated, i.
extern "C" __global__ void __launch_bounds__(kThreads)
    distinct_insert(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                    int segment_count, u32* words, u32 base, u32* __restrict__ slots) {
  const Tile tile(segments, segment_count);
  if (tile.slot_count == 0) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const i64 at = tile.key(turn);
      if (at < tile.end) slots[at] = static_cast<u32>(at);
    }
    return;
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; turn += kFlight) {
    i64 key[kFlight];
    u32 slot[kFlight], word[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const i64 at = tile.key(turn + f);
      key[f] = at < tile.end ? keys[at] : 0;
    }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const u32 high = static_cast<u32>(mix(static_cast<u64>(key[f])) >> 32);
      slot[f] = static_cast<u32>(static_cast<u64>(high) * tile.slot_count >> 32);
      word[f] = fetch(words + tile.slots + slot[f]);
    }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const i64 at = tile.key(turn + f);
      if (at >= tile.end) continue;
      const u32 mine = base + static_cast<u32>(at);
      u32 here = slot[f], seen = word[f];
      while (true) {
        u32* place = words + tile.slots + here;
        if (seen < base) {
          const u32 was = atomicCAS(place, seen, mine);
          if (was == seen) break;
          seen = was;
        } else if (keys[seen - base] == key[f]) {
          if (mine < seen) atomicMin(place, mine);
          break;
        } else {
          here = here + 1 == tile.slot_count ? 0 : here + 1;
          seen = fetch(words + tile.slots + here);
        }
      }
      slots[at] = tile.slots + here;
    }
  }
}

// firsts[i] was a slot, and becomes the first position of key i.
extern "C" __global__ void __launch_bounds__(kThreads)
    distinct_count(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                   int segment_count, u32 ranks, u32* __restrict__ counts, u32 tiles,
                   const u32* __restrict__ words, u32 base, u32* __restrict__ firsts) {
  extern __shared__ u32 counters[];
  const Tile tile(segments, segment_count);
  count_tile(tile, keys, ranks, ByOwner{tile.kind, ranks}, counts, tiles, counters, [=](i64 at) {
    if (tile.slot_count == 0) return true;
    const u32 first = words[firsts[at]] - base;
    firsts[at] = first;
    return first == static_cast<u32>(at);
  });
}

// numbers[i] of each first position i, and the keys in that order.
extern "C" __global__ void __launch_bounds__(kThreads)
    distinct_number(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                    int segment_count, u32 ranks, const u32* __restrict__ counts, u32 tiles,
                    const u32* __restrict__ starts, const u32* __restrict__ firsts,
                    u32* __restrict__ numbers, i64* __restrict__ distinct) {
  extern __shared__ u32 counters[];
  const Tile tile(segments, segment_count);
  place_tile(
      tile, keys, ranks, ByOwner{tile.kind, ranks}, counts, tiles, starts, counters,
      [=](i64 at) { return firsts[at] == static_cast<u32>(at); },
      [=](i64 at, i64 key, u32 number) {
        numbers[at] = number;
        distinct[number] = key;
      });
}

// inverse[i] was the first position of key i, and becomes its number.
extern "C" __global__ void __launch_bounds__(kThreads)
    distinct_inverse(const u32* __restrict__ numbers, i64 count, u32* __restrict__ inverse) {
  const i64 first = static_cast<i64>(blockIdx.x) * kTile + threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    if (at < count) inverse[at] = numbers[inverse[at]];
  }
}

// Numbers that are copied to or from a part of an array.
struct Part {
  i64 tile;      // its first one
  i64 from, to;  // addresses
  i64 count;
  i64 before;  // what is subtracted from each
};

template <class Number>
__device__ __forceinline__ void copy_part(const Part& part) {
  const Number* from = reinterpret_cast<const Number*>(part.from);
  Number* to = reinterpret_cast<Number*>(part.to);
  const i64 first = (blockIdx.x - part.tile) * kTile + threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    if (at < part.count) to[at] = from[at] - static_cast<Number>(part.before);
  }
}

// Joins keys of several arrays, or deals keys out to several.
extern "C" __global__ void __launch_bounds__(kThreads)
    copy_keys(const Part* __restrict__ parts, int count) {
  copy_part<i64>(holding(parts, count, blockIdx.x));
}

// The same of numbers of keys; those of each part begin at 0 again.
extern "C" __global__ void __launch_bounds__(kThreads)
    copy_numbers(const Part* __restrict__ parts, int count) {
  copy_part<int>(holding(parts, count, blockIdx.x));
}
