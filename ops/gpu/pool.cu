// Pooled look-ups: rows combined by sample, and what their gradients need. pool.py describes and
// launches these kernels.

#include "sums.cuh"

constexpr int kFlight = 4;

enum Combiner { kRows, kSum, kMean, kSqrtN };  // as in ops/embedding_bag.py

struct Lookup {
  i64 tile;        // its first one
  i64 first, end;  // of its samples
  i64 dim;
  i64 lanes;      // of a group
  i64 out;        // address
  i64 run, runs;  // where its rows are
  i64 combiner;
  i64 weighted;
  i64 max_norm;  // the bits of a float; 0 for none

  __device__ __forceinline__ float norm() const {
    return __uint_as_float(static_cast<u32>(max_norm));
  }
};

// Ids of all look-ups: where the row of each is, its weight, and the square of its row's norm where
// there is a max_norm.
struct Ids {
  const void* positions;
  int wide;  // positions are of 64 bits
  const int* offsets;
  const float* weights;
  const float* squares;

  __device__ __forceinline__ i64 row(u32 id) const {
    return wide != 0 ? static_cast<const i64*>(positions)[id]
                     : static_cast<const int*>(positions)[id];
  }
};

#define IDS_PARAMETERS                                                                      \
  const Lookup *__restrict__ lookups, int lookup_count, const void *__restrict__ positions, \
      int wide, const int *__restrict__ offsets, const float *__restrict__ weights,         \
      const float *__restrict__ squares
#define IDS \
  Ids { positions, wide, offsets, weights, squares }

// The factor by which a row's norm isn't above max_norm. A NaN stays one.
__device__ __forceinline__ float clip_of(float square, float max_norm) {
  const float norm = sqrtf(square);
  return max_norm / (norm < max_norm ? max_norm : norm);
}

__device__ __forceinline__ float factor_of(const Lookup& lookup, const Ids& ids, u32 id) {
  const float weight = lookup.weighted != 0 ? ids.weights[id] : 1.f;
  return lookup.max_norm != 0 ? weight * clip_of(ids.squares[id], lookup.norm()) : weight;
}

// As on the CPU, weights are added in double precision, so that those which cancel out do so
// everywhere.
__device__ __forceinline__ double share_of(const Lookup& lookup, float weight) {
  return lookup.combiner == kMean ? weight : static_cast<double>(weight) * weight;
}

__device__ __forceinline__ float divisor_of(const Lookup& lookup, double sum) {
  if (lookup.combiner == kSum) return 1;
  return static_cast<float>(lookup.combiner == kMean ? sum : sqrt(sum));
}

__device__ __forceinline__ float divisor_of(const Lookup& lookup, const Ids& ids, u32 begin,
                                            u32 end) {
  double sum = end - begin;
  if (lookup.weighted != 0 && lookup.combiner != kSum) {
    sum = 0;
    for (u32 id = begin; id < end; ++id) sum += share_of(lookup, ids.weights[id]);
  }
  return divisor_of(lookup, sum);
}

// Finds the rows of ids.
struct FindId {
  const Lookup& lookup;
  const Ids& ids;
  const Run* runs;

  __device__ __forceinline__ Found operator()(u32 id) const {
    const i64 row = ids.row(id);
    return {address_of(runs, static_cast<int>(lookup.runs), row, lookup.dim * kFloatBytes),
            factor_of(lookup, ids, id)};
  }
};

// The same where all rows are in one run and have the factor 1.
struct FindInRun {
  const Ids& ids;
  Run run;
  i64 pitch;

  __device__ __forceinline__ Found operator()(u32 id) const {
    return {address_in(run, ids.row(id), pitch), 1};
  }
};

// Pools the samples of a tile; a group of lanes has kFlight in flight. Each lane looks one of them
// up.
template <bool kPlain, class Find>
__device__ __forceinline__ void pool_tile(const Lookup& lookup, const Ids& ids, Find find) {
  const int lanes = static_cast<int>(lookup.lanes), groups = kThreads / lanes;
  const Group group = {lanes, static_cast<int>(threadIdx.x) & (lanes - 1)};
  const i64 first = lookup.first + (blockIdx.x - lookup.tile) * (groups * kFlight) +
                    threadIdx.x / lanes,
            sample = first + group.lane % kFlight * groups,
            at = sample < lookup.end ? sample : lookup.first;
  Range range = {static_cast<u32>(ids.offsets[at]), static_cast<u32>(ids.offsets[at + 1])};
  if (sample >= lookup.end) range.end = range.begin;
  const float divisor = kPlain ? divisor_of(lookup, range.end - range.begin)
                               : divisor_of(lookup, ids, range.begin, range.end);
#pragma unroll 1
  for (int base = 0; base * kWidth < lookup.dim; base += lanes) {
    const Span span(base + group.lane, lookup.dim);
    float sums[kFlight][kWidth];
    sum_ranges<kFlight, kPlain>(group, range, span, lookup.dim, find, sums);
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const float by = __shfl_sync(kAllLanes, divisor, f, lanes);
      Pack<kWidth> pooled;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) pooled.elements[e] = by == 0 ? 0 : sums[f][e] / by;
      if (first + f * groups >= lookup.end) continue;
      put<kPlain>(lookup.out + (first - lookup.first + f * groups) * lookup.dim * kFloatBytes, span,
                  pooled);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    pool_rows(IDS_PARAMETERS, const Run* __restrict__ runs) {
  const Ids ids = IDS;
  const Lookup& lookup = holding(lookups, lookup_count, blockIdx.x);
  pool_tile<false>(lookup, ids, FindId{lookup, ids, runs + lookup.run});
}

// The same where no look-up is weighted or clips rows, the rows of each are in one run, and all
// rows and results allow whole accesses.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    pool_rows_plain(IDS_PARAMETERS, const Run* __restrict__ runs) {
  const Ids ids = IDS;
  const Lookup& lookup = holding(lookups, lookup_count, blockIdx.x);
  pool_tile<true>(lookup, ids, FindInRun{ids, runs[lookup.run], lookup.dim * kFloatBytes});
}

// products[id]: of its row with itself, or with its sample's gradient if there are any. One sample
// for each group of lanes.
extern "C" __global__ void __launch_bounds__(kThreads)
    pool_products(IDS_PARAMETERS, const Run* __restrict__ runs, const Run* __restrict__ gradients,
                  int gradient_count, float* __restrict__ products) {
  const Ids ids = IDS;
  const Lookup& lookup = holding(lookups, lookup_count, blockIdx.x);
  const u32 lanes = static_cast<u32>(lookup.lanes), lane = threadIdx.x & (lanes - 1);
  const i64 sample =
      lookup.first + (blockIdx.x - lookup.tile) * (kThreads / lanes) + threadIdx.x / lanes;
  if (sample >= lookup.end) return;
  const u32 peers = lanes == 32 ? kAllLanes : ((1u << lanes) - 1) << (threadIdx.x % 32 - lane);
  const i64 other = gradients == nullptr
                        ? 0
                        : address_of(gradients, gradient_count, sample, lookup.dim * kFloatBytes);
  for (u32 id = static_cast<u32>(offsets[sample]); id < static_cast<u32>(offsets[sample + 1]);
       ++id) {
    const i64 row[1] = {address_of(runs + lookup.run, static_cast<int>(lookup.runs), ids.row(id),
                                   lookup.dim * kFloatBytes)};
    const i64 with[1] = {gradients == nullptr ? row[0] : other};
    float sum = 0;
    for (int access = static_cast<int>(lane); access * kWidth < lookup.dim;
         access += static_cast<int>(lanes)) {
      const Span span(access, lookup.dim);
      float here[1][kWidth], there[1][kWidth];
      fetch<false>(row, span, here);
      fetch<false>(with, span, there);
#pragma unroll
      for (int e = 0; e < kWidth; ++e)
        sum += here[0][e] * there[0][e];  // beyond the row's end they are 0
    }
    for (u32 distance = lanes / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(peers, sum, static_cast<int>(distance));
    if (lane == 0) products[id] = sum;
  }
}

// Makes the terms of each id: its sample, the factor of that sample's gradient, and how much of the
// row itself belongs to its gradient. One sample for each thread; tiles are of kThreads samples.
extern "C" __global__ void __launch_bounds__(kThreads)
    pool_terms(IDS_PARAMETERS, const float* __restrict__ products, Term* __restrict__ terms,
               float* __restrict__ along) {
  const Ids ids = IDS;
  const Lookup& lookup = holding(lookups, lookup_count, blockIdx.x);
  const i64 sample = lookup.first + (blockIdx.x - lookup.tile) * kThreads + threadIdx.x;
  if (sample >= lookup.end) return;
  const u32 begin = static_cast<u32>(offsets[sample]), end = static_cast<u32>(offsets[sample + 1]);
  const float divisor = divisor_of(lookup, ids, begin, end), share = divisor == 0 ? 0 : 1 / divisor;
  for (u32 id = begin; id < end; ++id) {
    const float factor = factor_of(lookup, ids, id) * share;
    terms[id] = {static_cast<u32>(sample), factor};
    if (along == nullptr) continue;
    const float square = lookup.max_norm != 0 ? squares[id] : 0;
    const bool clipped = square > 0 && sqrtf(square) >= lookup.norm();
    along[id] = clipped ? -factor * products[id] / square : 0;
  }
}

// Gradients of weights, which `products` become. With p the product of the (clipped) row and its
// sample's gradient: p for sums; (p - sum(w p) / sum(w)) / sum(w) for means; (p - w sum(w p) / q) /
// sqrt(q) with q = sum(w w) for sqrtn. 0 where the sum of weights is.
extern "C" __global__ void __launch_bounds__(kThreads)
    pool_weights(IDS_PARAMETERS, const float* __restrict__ products,
                 float* __restrict__ gradients) {
  const Ids ids = IDS;
  const Lookup& lookup = holding(lookups, lookup_count, blockIdx.x);
  const i64 sample = lookup.first + (blockIdx.x - lookup.tile) * kThreads + threadIdx.x;
  if (sample >= lookup.end) return;
  const u32 begin = static_cast<u32>(offsets[sample]), end = static_cast<u32>(offsets[sample + 1]);
  const double divisor = divisor_of(lookup, ids, begin, end);
  double pooled = 0;
  for (u32 id = begin; id < end; ++id) {
    const float product =
        lookup.max_norm != 0 ? products[id] * clip_of(squares[id], lookup.norm()) : products[id];
    gradients[id] = lookup.weighted != 0 ? product : 0;
    if (lookup.weighted != 0) pooled += static_cast<double>(weights[id]) * product;
  }
  if (lookup.combiner == kSum || lookup.weighted == 0) return;
  for (u32 id = begin; id < end; ++id) {
    const double share = lookup.combiner == kMean ? 1 / divisor : weights[id] / (divisor * divisor);
    gradients[id] =
        divisor == 0 ? 0 : static_cast<float>((gradients[id] - share * pooled) / divisor);
  }
}
