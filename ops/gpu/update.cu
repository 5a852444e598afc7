// Updates of rows by the sums of their gradients. update.py describes and launches these kernels.

#include "targets.cuh"
#include "rules.cuh"

// Rows that a group of lanes has in flight, and segments that it sums. Of a long segment, whose
// parts it sums as sum_rows_long does, it has the one row: the sum doesn't depend on the kernel.
template <bool kLong>
struct Flight {
  static constexpr int kRows = kLong ? 1 : 2, kSums = kLong ? 4 : 2;
};
template <bool kLong>
using ShareOf = Share<Flight<kLong>::kSums>;

// Blocks of a multiprocessor: what registers allow without a spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define RESIDENT(Rule) 2
#else
#define RESIDENT(Rule) (Rule::kSlots > 1 ? 2 : 3)
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define RESIDENT_ROW_WISE 2
#else
#define RESIDENT_ROW_WISE 3
#endif

// Weights and slots are read and written in the same kernel: not by way of read-only memory.
template <bool kWhole>
__device__ __forceinline__ Pack<kWidth> read(i64 address, i64 row, i64 dim, const Span& span) {
  const float* from = reinterpret_cast<const float*>(address) + row * dim + span.element;
  if (kWhole || span.is_whole(from)) return read_where(row >= 0 && span.count > 0, from);
  Pack<kWidth> pack;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) pack.elements[e] = e < span.count && row >= 0 ? from[e] : 0;
  return pack;
}

// What weights are kept within after their update; a NaN stays one.
struct Bound {
  bool is_there;
  float bound;

  // Args: bounds: of each target; null if there are none.
  __device__ __forceinline__ Bound(const float* bounds, i64 target)
      : is_there(bounds != nullptr), bound(is_there ? bounds[target] : 0) {}
  __device__ __forceinline__ float operator()(float w) const {
    return is_there && w > bound ? bound : is_there && w < -bound ? -bound : w;
  }
};

// A thread's elements of rows and of their slots. kWhole: as `fetch` has it.
template <class Rule, int kRows, bool kWhole>
struct Held {
  static constexpr int kSlots = Rule::kSlots;
  Pack<kWidth> weights[kRows], slots[kRows][kSlots + 1];

  __device__ __forceinline__ Held(const Target& target, const i64 (&rows)[kRows],
                                  const Span& span) {
#pragma unroll
    for (int f = 0; f < kRows; ++f) {
      weights[f] = read<kWhole>(target.values, rows[f], target.dim, span);
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        slots[f][s] = read<kWhole>(target.slots[s], rows[f], target.dim, span);
    }
  }

  // Args: rule: of the flight, the weight, its gradient, and its slots.
  template <class OfFlight>
  __device__ __forceinline__ void update(const OfFlight& rule, const Target& target,
                                         const i64 (&rows)[kRows], const Span& span,
                                         const float (&gradients)[kRows][kWidth],
                                         const Bound& bound) {
#pragma unroll
    for (int f = 0; f < kRows; ++f) {
      if (rows[f] < 0) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        float values[kSlots + 1];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) values[s] = slots[f][s].elements[e];
        weights[f].elements[e] = bound(rule(f, weights[f].elements[e], gradients[f][e], values));
#pragma unroll
        for (int s = 0; s < kSlots; ++s) slots[f][s].elements[e] = values[s];
      }
      put<kWhole>(target.values + rows[f] * target.dim * kFloatBytes, span, weights[f]);
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        put<kWhole>(target.slots[s] + rows[f] * target.dim * kFloatBytes, span, slots[f][s]);
    }
  }
};

// Whether all accesses to weights and slots are whole.
template <class Rule>
__device__ __forceinline__ bool are_whole(const Target& target) {
  i64 addresses = target.values;
#pragma unroll
  for (int s = 0; s < Rule::kSlots; ++s) addresses |= target.slots[s];
  return target.dim % kWidth == 0 && addresses % kAccessBytes == 0;
}

// The gradients of a group's rows: sums, times `scale`.
template <bool kLong>
__device__ __forceinline__ void sum_gradients(const ShareOf<kLong>& share, const Span& span,
                                              float scale,
                                              float (&gradients)[Flight<kLong>::kRows][kWidth]) {
  float sums[Flight<kLong>::kSums][kWidth];
  if (kLong) {
    sum_long(share, span, sums);
  } else {
    sum_segments(share, span, sums);
  }
#pragma unroll
  for (int f = 0; f < Flight<kLong>::kRows; ++f) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) gradients[f][e] = sums[f][e] * scale;
  }
}

template <bool kLong, bool kWhole, class Rule>
__device__ __forceinline__ void update_spans(const Rule& rule, const ShareOf<kLong>& share,
                                             const i64 (&rows)[Flight<kLong>::kRows], float scale,
                                             const Bound& bound) {
  constexpr int kRows = Flight<kLong>::kRows;
  const Target& target = *share.target;
#pragma unroll 1
  for (int base = 0; base < accesses_of(target); base += share.group.lanes) {
    const Span span(base + share.group.lane, target.dim);
    // Before the sums: what they wait for is a chain of four.
    Held<Rule, kRows, kWhole> held(target, rows, span);
    float gradients[kRows][kWidth];
    sum_gradients<kLong>(share, span, scale, gradients);
    held.update([&](int, float w, float g, float* slots) { return rule(w, g, slots); }, target,
                rows, span, gradients, bound);
  }
}

template <bool kLong>
__device__ __forceinline__ void take_rows(const ShareOf<kLong>& share,
                                          i64 (&rows)[Flight<kLong>::kRows]) {
#pragma unroll
  for (int f = 0; f < Flight<kLong>::kRows; ++f) rows[f] = share.row[f];
}

template <bool kLong, class Rule>
__device__ __forceinline__ void update_rows(const Rule& rule, const ShareOf<kLong>& share,
                                            float scale, const Bound& bound) {
  const Target& target = *share.target;
  i64 rows[Flight<kLong>::kRows];
  take_rows<kLong>(share, rows);
#pragma unroll
  for (int f = 0; f < Flight<kLong>::kRows; ++f) {
    if (target.touched != 0 && share.group.lane == 0 && rows[f] >= 0) {
      reinterpret_cast<unsigned char*>(target.touched)[rows[f]] = 1;
    }
  }
  if (are_whole<Rule>(target)) {
    update_spans<kLong, true>(rule, share, rows, scale, bound);
  } else {
    update_spans<kLong, false>(rule, share, rows, scale, bound);
  }
}

// A row's slot is one number: gradients are summed for it first, and once more for the weights of a
// row that the group's lanes don't cover in one turn.
template <bool kLong, bool kWhole>
__device__ __forceinline__ void update_row_wise_spans(const RowWiseAdagrad& rule,
                                                      const ShareOf<kLong>& share, float scale,
                                                      const Bound& bound) {
  constexpr int kRows = Flight<kLong>::kRows;
  const Target& target = *share.target;
  i64 rows[kRows];
  take_rows<kLong>(share, rows);
  float* const slots = reinterpret_cast<float*>(target.slots[0]);
  float accumulated[kRows], gradients[kRows][kWidth], squares[kRows] = {};
  // Before the sums, as above.
#pragma unroll
  for (int f = 0; f < kRows; ++f) accumulated[f] = read_one_where(rows[f] >= 0, slots + rows[f]);
  Held<RowWiseAdagrad, kRows, kWhole> held(target, rows, Span(share.group.lane, target.dim));
#pragma unroll 1
  for (int base = 0; base < accesses_of(target); base += share.group.lanes) {
    sum_gradients<kLong>(share, Span(base + share.group.lane, target.dim), scale, gradients);
#pragma unroll
    for (int f = 0; f < kRows; ++f) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) squares[f] += gradients[f][e] * gradients[f][e];
    }
  }
#pragma unroll
  for (int f = 0; f < kRows; ++f) {
#pragma unroll 1
    for (int lanes = share.group.lanes / 2; lanes > 0; lanes /= 2)
      squares[f] += __shfl_xor_sync(kAllLanes, squares[f], lanes);
    accumulated[f] = rule.accumulated(accumulated[f], squares[f], target.dim);
  }
  __syncwarp();  // All lanes have read.
#pragma unroll
  for (int f = 0; f < kRows; ++f) {
    if (share.group.lane == 0 && rows[f] >= 0) slots[rows[f]] = accumulated[f];
  }
#pragma unroll 1
  for (int base = 0; base < accesses_of(target); base += share.group.lanes) {
    const Span span(base + share.group.lane, target.dim);
    if (base > 0) held = {target, rows, span};
    if (accesses_of(target) > share.group.lanes)
      sum_gradients<kLong>(share, span, scale, gradients);
    held.update([&](int f, float w, float g, float*) { return rule(w, g, accumulated[f]); }, target,
                rows, span, gradients, bound);
  }
}

template <bool kLong>
__device__ __forceinline__ void update_row_wise(const RowWiseAdagrad& rule,
                                                const ShareOf<kLong>& share, float scale,
                                                const Bound& bound) {
  if (are_whole<RowWiseAdagrad>(*share.target)) {
    update_row_wise_spans<kLong, true>(rule, share, scale, bound);
  } else {
    update_row_wise_spans<kLong, false>(rule, share, scale, bound);
  }
}

#define KERNELS(name, Rule, resident, rows)                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, resident)                             \
      update_##name(WORK_PARAMETERS, float scale, const float* __restrict__ options,           \
                    const float* __restrict__ bounds) {                                        \
    const Rule rule(options);                                                                  \
    for_segments<Flight<false>::kSums, false>(WORK, SOURCE, [=](const ShareOf<false>& share) { \
      rows<false>(rule, share, scale, Bound(bounds, share.target - targets));                  \
    });                                                                                        \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
      update_##name##_long(WORK_PARAMETERS, float scale, const float* __restrict__ options,    \
                           const float* __restrict__ bounds) {                                 \
    const Rule rule(options);                                                                  \
    for_longs<Flight<true>::kSums>(WORK, SOURCE, [=](const ShareOf<true>& share) {             \
      rows<true>(rule, share, scale, Bound(bounds, share.target - targets));                   \
    });                                                                                        \
  }
#define UPDATE(name, Rule) KERNELS(name, Rule, RESIDENT(Rule), update_rows)

KERNELS(row_wise_adagrad, RowWiseAdagrad, RESIDENT_ROW_WISE, update_row_wise)
FOR_EACH_RULE(UPDATE)

// Adam with a gradient of 0, of the rows that aren't touched; none is, afterwards.
extern "C" __global__ void __launch_bounds__(kThreads)
    adam_decay(const Target* __restrict__ targets, int target_count,
               const float* __restrict__ options) {
  const Target& target = holding(targets, target_count, blockIdx.x);
  const Adam adam(options);
  const int lanes = static_cast<int>(target.lanes),
            lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const i64 rows[1] = {(blockIdx.x - target.tile) * (kThreads / lanes) + threadIdx.x / lanes};
  unsigned char* touched = reinterpret_cast<unsigned char*>(target.touched) + rows[0];
  const bool is_row = rows[0] < target.count, skipped = !is_row || *touched != 0;
  __syncwarp();
  if (skipped) {
    if (lane == 0 && is_row) *touched = 0;
    return;
  }
  const float none[1][kWidth] = {};
  for (int access = lane; access < accesses_of(target); access += lanes) {
    const Span span(access, target.dim);
    Held<Adam, 1, false> held(target, rows, span);
    held.update([&](int, float w, float g, float* slots) { return adam(w, g, slots); }, target,
                rows, span, none, Bound(nullptr, 0));
  }
}
