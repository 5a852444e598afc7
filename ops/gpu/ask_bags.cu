// What a rank requests of pooled sections: bags, one for each sample and owner, and what the rank
// that asks needs to know of them. ops/native/gpu/ask_bags.h launches these kernels.
//
// Keys are ordered by owner, section, position; what one owner and one section have is a *run*. A
// bag is keys of one run and one sample, side by side. Each key of a section that isn't pooled is a
// bag of its own, so that bags are numbered as the rows that come back.

#include "scans.cuh"
#include "segments.cuh"

constexpr u32 kNone = 0xFFFFFFFFu;
constexpr i64 kPooled = 1, kWeighted = 2;  // of a section

enum Combiner { kRows, kSum, kMean, kSqrtN };  // as in ops/exchange/embedding_bag.py

// A member whose section is pooled.
struct Member {
  i64 tile;              // its first one
  i64 first, count;      // of its ids among all
  i64 samples, weights;  // where, in words of what was uploaded; no weights: 0
  i64 number;            // positive, larger than those of the members after it
  i64 combiner;
  i64 positions, bag_samples, bag_scales;  // addresses, by bag
};

// Finds the run of a key; fast for one in the run of the key before.
struct Runs {
  const u32* starts;  // [R + 1], the first key of each; how many there are
  u32 count;          // R
  u32 sections;
  const i64* kinds;  // of sections
  u32 run, end;      // the run that was found, and the end of its keys

  __device__ __forceinline__ Runs(const u32* starts, u32 count, u32 sections, const i64* kinds)
      : starts(starts), count(count), sections(sections), kinds(kinds), run(0), end(0) {}

  __device__ __forceinline__ u32 keys() const { return starts[count]; }
  __device__ __forceinline__ i64 kind() const { return kinds[run % sections]; }

  __device__ __forceinline__ void find(u32 key) {
    if (key < end) return;
    u32 low = 0, high = count;  // the last one that begins at or before the key
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      if (starts[middle] <= key) {
        low = middle;
      } else {
        high = middle;
      }
    }
    run = low;
    end = starts[low + 1];
  }

  // Whether a bag begins with this key.
  __device__ __forceinline__ bool begins(u32 key, const i64* samples) {
    find(key);
    return (kind() & kPooled) == 0 || key == starts[run] || samples[key] != samples[key - 1];
  }
};

#define RUNS_PARAMETERS \
  const u32 *__restrict__ starts, u32 runs, u32 sections, const i64 *__restrict__ kinds
#define RUNS Runs(starts, runs, sections, kinds)

// One block. starts[run]: how many keys are before those of a run.
extern "C" __global__ void __launch_bounds__(kThreads)
    run_starts(const int* __restrict__ counts, u32 runs, u32* __restrict__ starts) {
  __shared__ u32 sums[33];
  u32 before = 0;
  for (u32 first = 0; first < runs; first += kThreads) {
    const u32 run = first + threadIdx.x;
    u32 total;
    const u32 sum = exclusive_sum(run < runs ? counts[run] : 0, sums, &total);
    if (run < runs) starts[run] = before + sum;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) starts[runs] = before;
}

// Moves samples and weights of ids to where their keys went. `*unsorted` becomes the largest number
// of a member whose samples don't ascend from 0 on.
extern "C" __global__ void __launch_bounds__(kThreads)
    order_bags(const Member* __restrict__ members, int count, const i64* __restrict__ uploaded,
               const u32* __restrict__ numbers, i64* __restrict__ samples,
               float* __restrict__ weights, u32* unsorted) {
  for_tile(members, count, [=](const Member& member, i64 at) {
    const i64* mine = uploaded + member.samples;
    const u32 key = numbers[member.first + at];
    const i64 sample = mine[at];
    samples[key] = sample;
    if (member.weights != 0)
      weights[key] = reinterpret_cast<const float*>(uploaded + member.weights)[at];
    if (sample < (at > 0 ? mine[at - 1] : 0)) atomicMax(unsorted, static_cast<u32>(member.number));
  });
}

// How many bags begin in each tile of keys.
extern "C" __global__ void __launch_bounds__(kThreads)
    count_bags(RUNS_PARAMETERS, const i64* __restrict__ samples, u32* __restrict__ counts) {
  __shared__ u32 sums[33];
  Runs found = RUNS;
  const u32 keys = found.keys(), first = blockIdx.x * kTile + threadIdx.x;
  u32 begun = 0, total;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const u32 key = first + turn * kThreads;
    if (key < keys) begun += found.begins(key, samples);
  }
  exclusive_sum(begun, sums, &total);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// bags[key]: the bag that it is in; begins[bag]: its first key. `before`: bags before each tile.
extern "C" __global__ void __launch_bounds__(kThreads)
    number_bags(RUNS_PARAMETERS, const i64* __restrict__ samples, const u32* __restrict__ before,
                u32* __restrict__ bags, u32* __restrict__ begins) {
  __shared__ u32 sums[33];
  Runs found = RUNS;
  const u32 keys = found.keys(), first = blockIdx.x * kTile + threadIdx.x;
  u32 until = before[blockIdx.x];
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const u32 key = first + turn * kThreads;
    const u32 begun = key < keys && found.begins(key, samples) ? 1 : 0;
    u32 total;
    const u32 bag = until + exclusive_sum(begun, sums, &total) + begun - 1;
    if (key < keys) bags[key] = bag;
    if (begun != 0) begins[bag] = key;
    until += total;
    __syncthreads();
  }
}

// One block: for each run its first bag, and where its keys are in the message. `*bag_count`: of
// all runs. `told` [2, R]: how many bags and keys each run has.
extern "C" __global__ void __launch_bounds__(kThreads)
    place_runs(RUNS_PARAMETERS, const u32* __restrict__ bags, const u32* __restrict__ bag_count,
               u32* __restrict__ begins, u32* __restrict__ first_bags, u32* __restrict__ places,
               int* __restrict__ told) {
  __shared__ u32 sums[33];
  const u32 keys = starts[runs], bag_total = *bag_count;
  const auto bags_before = [=](u32 run) {
    return starts[run] < keys ? bags[starts[run]] : bag_total;
  };
  u32 before = 0;
  for (u32 first = 0; first < runs; first += kThreads) {
    const u32 run = first + threadIdx.x;
    u32 header = 0, words = 0, total;
    if (run < runs) {
      const u32 first_bag = bags_before(run), bag_count_of = bags_before(run + 1) - first_bag,
                key_count = starts[run + 1] - starts[run];
      const i64 kind = kinds[run % sections];
      first_bags[run] = first_bag;
      told[run] = static_cast<int>(bag_count_of);
      told[runs + run] = static_cast<int>(key_count);
      header = run % sections == 0 ? 2 * sections : 0;
      words = header + key_count;
      if ((kind & kPooled) != 0) words += (bag_count_of + 1) / 2;
      if ((kind & kWeighted) != 0) words += (key_count + 1) / 2;
    }
    const u32 sum = exclusive_sum(words, sums, &total);
    if (run < runs) places[run] = before + sum + header;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    first_bags[runs] = bag_total;
    begins[bag_total] = keys;
  }
}

// Two numbers of 32 bits lie in a word. The last one of an odd count has zeros after it.
template <class T>
__device__ __forceinline__ void put_half(i64* words, u32 at, u32 count, T value) {
  T* halves = reinterpret_cast<T*>(words);
  halves[at] = value;
  if (at + 1 == count && count % 2 != 0) halves[count] = 0;
}

// The message: for each rank, for each section (bags, keys); then for each section its keys, how
// long its bags are if it is pooled, and the keys' weights if it is weighted.
extern "C" __global__ void __launch_bounds__(kThreads)
    write_bags(RUNS_PARAMETERS, const i64* __restrict__ keys, const float* __restrict__ weights,
               const u32* __restrict__ bags, const u32* __restrict__ begins,
               const u32* __restrict__ first_bags, const u32* __restrict__ places,
               i64* __restrict__ message) {
  Runs found = RUNS;
  const u32 key_count = found.keys();
  const i64 first = static_cast<i64>(blockIdx.x) * kTile + threadIdx.x;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    if (at < runs) {
      const u32 run = static_cast<u32>(at), section = run % sections;
      i64* header = message + places[run - section] - 2 * sections + 2 * section;
      header[0] = first_bags[run + 1] - first_bags[run];
      header[1] = starts[run + 1] - starts[run];
      continue;
    }
    if (at - runs >= key_count) return;
    const u32 key = static_cast<u32>(at - runs);
    found.find(key);
    const u32 start = starts[found.run], mine = found.end - start,
              first_bag = first_bags[found.run], bag_count = first_bags[found.run + 1] - first_bag;
    i64* words = message + places[found.run];
    words[key - start] = keys[key];
    words += mine;
    if ((found.kind() & kPooled) != 0) {
      const u32 bag = bags[key];
      if (begins[bag] == key) {
        put_half(words, bag - first_bag, bag_count, static_cast<int>(begins[bag + 1] - key));
      }
      words += (bag_count + 1) / 2;
    }
    if ((found.kind() & kWeighted) != 0) put_half(words, key - start, mine, weights[key]);
  }
}

// begun[id]: the bag that begins with it, kNone for none; and how many do in each tile of ids.
extern "C" __global__ void __launch_bounds__(kThreads)
    begin_bags(const Member* __restrict__ members, int count, const u32* __restrict__ numbers,
               const u32* __restrict__ bags, const u32* __restrict__ begins,
               u32* __restrict__ begun, u32* __restrict__ counts) {
  __shared__ u32 sums[33];
  u32 mine = 0, total;
  for_tile(members, count, [&](const Member& member, i64 at) {
    const u32 key = numbers[member.first + at], bag = bags[key];
    const bool begins_it = begins[bag] == key;
    begun[member.first + at] = begins_it ? bag : kNone;
    mine += begins_it;
  });
  exclusive_sum(mine, sums, &total);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// The factor of the sum of the ids from `first` to before `end`; weights are added in double
// precision, as on the CPU.
__device__ __forceinline__ float scale_of(const Member& member, const i64* uploaded, i64 first,
                                          i64 end) {
  if (member.combiner == kSum) return 1;
  double sum = static_cast<double>(end - first);
  if (member.weights != 0) {
    const float* weights = reinterpret_cast<const float*>(uploaded + member.weights);
    sum = 0;
    for (i64 at = first; at < end; ++at) {
      const double weight = weights[at];
      sum += member.combiner == kMean ? weight : weight * weight;
    }
  }
  const float divisor = static_cast<float>(member.combiner == kMean ? sum : sqrt(sum));
  return divisor == 0 ? 0 : 1 / divisor;
}

// Lists the bags of each member by sample, then owner. `before`: how many begin before each tile of
// ids. A thread goes over all ids of a sample, once for each bag of it.
extern "C" __global__ void __launch_bounds__(kThreads)
    list_bags(const Member* __restrict__ members, int count, const i64* __restrict__ uploaded,
              const u32* __restrict__ begun, const u32* __restrict__ before) {
  __shared__ u32 sums[33];
  const Member member = holding(members, count, blockIdx.x);
  const i64 first = (blockIdx.x - member.tile) * kTile + threadIdx.x;
  const i64* samples = uploaded + member.samples;
  const u32* mine = begun + member.first;
  u32 until = before[blockIdx.x] - before[member.tile];
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    const u32 bag = at < member.count ? mine[at] : kNone;
    u32 total;
    u32 place = until + exclusive_sum(bag != kNone ? 1 : 0, sums, &total);
    until += total;
    __syncthreads();
    if (bag == kNone) continue;
    // Bags of one section are numbered by owner.
    const i64 sample = samples[at];
    i64 low = at, high = at + 1;
    for (; low > 0 && samples[low - 1] == sample; --low) {
      const u32 other = mine[low - 1];
      if (other != kNone && other > bag) --place;
    }
    for (; high < member.count && samples[high] == sample; ++high)
      if (mine[high] < bag) ++place;
    reinterpret_cast<u32*>(member.positions)[place] = bag;
    reinterpret_cast<i64*>(member.bag_samples)[place] = sample;
    reinterpret_cast<float*>(member.bag_scales)[place] = scale_of(member, uploaded, low, high);
  }
}
