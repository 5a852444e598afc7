// What a rank requests: the message of the distinct keys, and the row of each id.
// ops/native/gpu/ask.cc launches these kernels, distinct.py describes what is before them;
// ask_bags.cu has what pooled sections need besides.

#include "segments.cuh"

struct Member {
  i64 tile;          // its first one
  i64 positions;     // address
  i64 first, count;  // of its ids among all
};

// Samples that are told by the ids with which they begin.
struct Offsets {
  i64 tile;              // its first one, of kThreads samples
  i64 offsets, samples;  // where these are: among numbers of 32 bits, among samples
  i64 count;             // of samples
};

// samples[id]: the sample of each id. A warp goes over the ids of its samples together.
extern "C" __global__ void __launch_bounds__(kThreads)
    fill_samples(const Offsets* __restrict__ members, int count, const int* __restrict__ numbers,
                 i64* __restrict__ samples) {
  const Offsets& member = holding(members, count, blockIdx.x);
  const i64 sample = (blockIdx.x - member.tile) * kThreads + threadIdx.x;
  const int* offsets = numbers + member.offsets;
  const u32 lane = threadIdx.x % 32;
  // After the last sample there are empty ones.
  const u32 begin = static_cast<u32>(offsets[min(sample, member.count)]),
            end = static_cast<u32>(offsets[min(sample + 1, member.count)]);
  const u32 last = __shfl_sync(kAllLanes, end, 31);
  for (u32 base = __shfl_sync(kAllLanes, begin, 0); base < last; base += 32) {
    const int of = lane_holding(begin, base + lane);
    if (base + lane < last) samples[member.samples + base + lane] = sample - lane + of;
  }
}

// rows[n]: the row of key n; null: n.
extern "C" __global__ void __launch_bounds__(kThreads)
    write_positions(const Member* __restrict__ members, int count, const u32* __restrict__ numbers,
                    const u32* __restrict__ firsts, const u32* __restrict__ rows) {
  for_tile(members, count, [=](const Member& member, i64 at) {
    const u32 number = numbers[firsts[member.first + at]];
    reinterpret_cast<u32*>(member.positions)[at] = rows == nullptr ? number : rows[number];
  });
}

// For each rank, for each section twice its count, and the keys. `keys` are in that order, those of
// rank r from starts[r] on; starts[ranks] is how many there are.
extern "C" __global__ void __launch_bounds__(kThreads)
    write_request(const i64* __restrict__ keys, const int* __restrict__ counts,
                  const u32* __restrict__ starts, u32 ranks, u32 sections,
                  i64* __restrict__ message) {
  const i64 header = 2 * static_cast<i64>(sections), headers = header * ranks;
  const i64 first = static_cast<i64>(blockIdx.x) * kTile + threadIdx.x;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    if (at < headers) {
      const i64 rank = at / header, word = at % header;
      message[rank * header + starts[rank] + word] = counts[rank * sections + word / 2];
      continue;
    }
    const i64 key = at - headers;
    if (key >= starts[ranks]) return;
    u32 low = 0, high = ranks;  // the last rank whose keys begin at or before this one
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      if (starts[middle] <= key) {
        low = middle;
      } else {
        high = middle;
      }
    }
    message[(low + 1) * header + key] = keys[key];
  }
}
