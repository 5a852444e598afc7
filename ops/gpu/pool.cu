// Pooled look-ups: rows combined by sample, and what their gradients need. pool.py describes and
// launches these kernels.

#include "lookups.cuh"

constexpr int kFlight = 4;
constexpr u32 kNowhere = 0xFFFFFFFFu;  // no row that could be has this number

// Finds the rows of ids.
struct FindId {
  const Lookup& lookup;
  const Ids& ids;
  const Run* runs;

  __device__ __forceinline__ Found operator()(u32 id) const {
    const i64 row = ids.row(lookup, id);
    return {address_of(runs, static_cast<int>(lookup.runs), row, lookup.dim * kFloatBytes),
            factor_of(lookup, ids, id)};
  }
};

// The same where all rows are in one run and have the factor 1.
struct FindInRun {
  const Lookup& lookup;
  const Ids& ids;
  Run run;
  i64 pitch;

  __device__ __forceinline__ Found operator()(u32 id) const {
    return {address_in(run, ids.row(lookup, id), pitch), 1};
  }
};

// Sums the rows of kFlight samples, from that of lane `turn` on. `range`: that of this lane's
// flight; `head`: the row of the first id of this lane's sample.
template <bool kPlain, class Find>
__device__ __forceinline__ void sum_turn(const Group& group, int turn, const Range& range,
                                         const Found& head, const Span& span, i64 dim, Find find,
                                         float (&sums)[kFlight][kWidth]) {
  if (!__all_sync(kAllLanes, range.end - range.begin <= 1)) {
    sum_ranges<kFlight, kPlain>(group, range, span, dim, find, sums);
    return;
  }
  set_zero(sums);
  if (kPlain || reads_whole(head, dim)) {
    add_found<kFlight, kPlain, true>(group, turn, head, span, sums);
  } else {
    add_found<kFlight, false, false>(group, turn, head, span, sums);
  }
}

// Divides the sums of kFlight samples, from that of lane `turn` on, by their divisors; those with
// the divisor 0 become 0.
__device__ __forceinline__ void divide(float divisor, int turn, int lanes,
                                       float (&sums)[kFlight][kWidth]) {
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    const float by = __shfl_sync(kAllLanes, divisor, turn + f, lanes);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[f][e] = by == 0 ? 0 : sums[f][e] / by;
  }
}

// Pools the samples of a tile. Each lane looks a sample of its group up, with its first id; then
// kFlight samples are in flight at once. Where samples have one id, as they often do, a group has
// one for each lane: what leads to their rows is waited for once. Where they have more, and there
// are not many, it has kFlight: so much work is shared out better in small parts.
template <bool kPlain, class Find>
__device__ __forceinline__ void pool_tile(const Lookup& lookup, const Ids& ids, Find find) {
  const int lanes = static_cast<int>(lookup.lanes), groups = kThreads / lanes;
  const Group group = {lanes, static_cast<int>(threadIdx.x) & (lanes - 1)};
  const int each = static_cast<int>(lookup.each);
  const i64 first =
                lookup.first + (blockIdx.x - lookup.tile) * (groups * each) + threadIdx.x / lanes,
            sample = first + group.lane * groups;
  const bool is_there = group.lane < each && sample < lookup.end;
  const i64 at = is_there ? sample : lookup.first;
  Range own = {static_cast<u32>(ids.offsets[at]), static_cast<u32>(ids.offsets[at + 1])};
  if (!is_there) own.end = own.begin;
  const float divisor = kPlain ? divisor_of(lookup, own.end - own.begin)
                               : divisor_of(lookup, ids, own.begin, own.end);
  // Sums of at most one row, unweighted, stay what they are: divisions take long.
  const bool divides = !kPlain || __any_sync(kAllLanes, divisor > 1);
  Found head = {0, 1};
  if (own.begin < own.end) head = find(own.begin);
#pragma unroll 1
  for (int turn = 0; turn < each; turn += kFlight) {
    const i64 begin = first + turn * groups;
    if (!__any_sync(kAllLanes, begin < lookup.end)) return;
    const int of = turn + group.lane % kFlight;
    const Range range = {__shfl_sync(kAllLanes, own.begin, of, lanes),
                         __shfl_sync(kAllLanes, own.end, of, lanes)};
#pragma unroll 1
    for (int base = 0; base * kWidth < lookup.dim; base += lanes) {
      const Span span(base + group.lane, lookup.dim);
      float sums[kFlight][kWidth];
      sum_turn<kPlain>(group, turn, range, head, span, lookup.dim, find, sums);
      if (divides) divide(divisor, turn, lanes, sums);
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        Pack<kWidth> pooled;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) pooled.elements[e] = sums[f][e];
        if (begin + f * groups >= lookup.end) continue;
        put<kPlain>(lookup.out + (begin - lookup.first + f * groups) * lookup.dim * kFloatBytes,
                    span, pooled);
      }
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
  pool_tile<true>(lookup, ids, FindInRun{lookup, ids, runs[lookup.run], lookup.dim * kFloatBytes});
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
    const i64 row[1] = {address_of(runs + lookup.run, static_cast<int>(lookup.runs),
                                   ids.row(lookup, id), lookup.dim * kFloatBytes)};
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
// row itself belongs to its gradient; and, if there are `numbers`, the number of its row, 0 for one
// that doesn't exist. A warp has as many samples as lanes, and goes over their ids together: these
// lie side by side. Tiles are of kThreads samples.
extern "C" __global__ void __launch_bounds__(kThreads)
    pool_terms(IDS_PARAMETERS, const float* __restrict__ products, Term* __restrict__ terms,
               float* __restrict__ along, int* __restrict__ numbers, i64 row_count) {
  const Ids ids = IDS;
  const Lookup& lookup = holding(lookups, lookup_count, blockIdx.x);
  const i64 sample = lookup.first + (blockIdx.x - lookup.tile) * kThreads + threadIdx.x;
  const u32 lane = threadIdx.x % 32;
  // After the last sample there are empty ones.
  const u32 begin = static_cast<u32>(offsets[min(sample, lookup.end)]),
            end = static_cast<u32>(offsets[min(sample + 1, lookup.end)]);
  const float divisor = divisor_of(lookup, ids, begin, end), share = divisor == 0 ? 0 : 1 / divisor;
  const u32 last = __shfl_sync(kAllLanes, end, 31);
  for (u32 base = __shfl_sync(kAllLanes, begin, 0); base < last; base += 32) {
    const u32 id = base + lane;
    const int of = lane_holding(begin, id);
    const float share_of_sample = __shfl_sync(kAllLanes, share, of);
    if (id >= last) continue;
    const float factor = factor_of(lookup, ids, id) * share_of_sample;
    Term term = {static_cast<u32>(sample - lane + of), factor};
    if (numbers != nullptr) {
      const i64 row = ids.row(lookup, id);
      const bool there = row >= 0 && row < row_count;
      numbers[id] = there ? static_cast<int>(row) : 0;
      if (!there) term.row = kNowhere;
    }
    terms[id] = term;
    if (along == nullptr) continue;
    const float square = lookup.max_norm != 0 ? squares[id] : 0;
    const bool clipped = square > 0 && sqrtf(square) >= lookup.norm();
    along[id] = clipped ? -factor * products[id] / square : 0;
  }
}

// Gradients of weights, to where a look-up's `out` has that of the first id of all. With p the
// product of the (clipped) row and its sample's gradient: p for sums; (p - sum(w p) / sum(w)) /
// sum(w) for means; (p - w sum(w p) / q) / sqrt(q) with q = sum(w w) for sqrtn. 0 where the sum of
// weights is.
extern "C" __global__ void __launch_bounds__(kThreads)
    pool_weights(IDS_PARAMETERS, const float* __restrict__ products) {
  const Ids ids = IDS;
  const Lookup& lookup = holding(lookups, lookup_count, blockIdx.x);
  const i64 sample = lookup.first + (blockIdx.x - lookup.tile) * kThreads + threadIdx.x;
  if (sample >= lookup.end || lookup.out == 0) return;
  const auto gradient_of = [&lookup](u32 id) -> float& {
    return *reinterpret_cast<float*>(lookup.out + static_cast<i64>(id) * kFloatBytes);
  };
  const u32 begin = static_cast<u32>(offsets[sample]), end = static_cast<u32>(offsets[sample + 1]);
  const double divisor = divisor_of(lookup, ids, begin, end);
  double pooled = 0;
  for (u32 id = begin; id < end; ++id) {
    const float product =
        lookup.max_norm != 0 ? products[id] * clip_of(squares[id], lookup.norm()) : products[id];
    gradient_of(id) = lookup.weighted != 0 ? product : 0;
    if (lookup.weighted != 0) pooled += static_cast<double>(lookup.weight(id)) * product;
  }
  if (lookup.combiner == kSum || lookup.weighted == 0) return;
  for (u32 id = begin; id < end; ++id) {
    const double share =
        lookup.combiner == kMean ? 1 / divisor : lookup.weight(id) / (divisor * divisor);
    gradient_of(id) =
        divisor == 0 ? 0 : static_cast<float>((gradient_of(id) - share * pooled) / divisor);
  }
}

// offsets[sample]: its first id. They ascend, and are of the look-up's own ids, whatever its
// samples are.
extern "C" __global__ void __launch_bounds__(kThreads)
    sample_offsets(const Batch* __restrict__ batches, int batch_count, int* __restrict__ offsets) {
  const Batch& batch = holding(batches, batch_count, blockIdx.x);
  const i64 number = (blockIdx.x - batch.tile) * kThreads + threadIdx.x,
            sample = batch.first + number;
  if (sample >= batch.end) return;
  const i64* samples = reinterpret_cast<const i64*>(batch.samples);
  i64 low = samples == nullptr ? number : 0, high = samples == nullptr ? number : batch.ids;
  if (number == 0) high = 0;
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (__ldg(samples + middle) < number) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  offsets[sample] = static_cast<int>(batch.id + low);
  if (sample == batch.end - 1) offsets[batch.end] = static_cast<int>(batch.id + batch.ids);
}
