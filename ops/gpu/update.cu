// Updates of rows by the sums of their gradients. update.py describes and launches these kernels.

#include "rules.cuh"
#include "targets.cuh"

constexpr int kFlight = 2;

// Blocks of a multiprocessor: what registers allow without a spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define RESIDENT(Rule) 2
#else
#define RESIDENT(Rule) (Rule::kSlots > 1 ? 2 : 3)
#endif

// Weights and slots are read and written in the same kernel: not by way of read-only memory.
__device__ __forceinline__ Pack<float, kWidth> read(i64 address, i64 row, i64 dim,
                                                    const Span& span) {
  Pack<float, kWidth> pack;
  const float* from = reinterpret_cast<const float*>(address) + row * dim + span.element;
  if (span.is_whole(from)) {
    pack.words = *reinterpret_cast<const uint4*>(from);
  } else {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) pack.elements[e] = e < span.count ? from[e] : 0;
  }
  return pack;
}

__device__ __forceinline__ float within(float value, float bound) {
  return value > bound ? bound : value < -bound ? -bound : value;  // a NaN stays one
}

// What a thread has of rows and their slots.
template <class Rule, int kRows>
struct Held {
  static constexpr int kSlots = Rule::kRowwise ? 0 : Rule::kSlots;
  Pack<float, kWidth> weights[kRows], slots[kRows][kSlots + 1];

  __device__ __forceinline__ Held(const Target& target, const i64 (&rows)[kRows],
                                  const Span& span) {
#pragma unroll
    for (int f = 0; f < kRows; ++f) {
      if (rows[f] < 0) continue;
      weights[f] = read(target.values, rows[f], target.dim, span);
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        slots[f][s] = read(target.slots[s], rows[f], target.dim, span);
    }
  }

  // `rates` are those of a rule by rows.
  __device__ __forceinline__ void update(const Rule& rule, const Target& target,
                                         const i64 (&rows)[kRows], const Span& span, float scale,
                                         float bound, const float (&rates)[kRows],
                                         const float (&sums)[kRows][kWidth]) {
#pragma unroll
    for (int f = 0; f < kRows; ++f) {
      if (rows[f] < 0) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        float values[kSlots + 1];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) values[s] = slots[f][s].elements[e];
        if constexpr (Rule::kRowwise) values[0] = rates[f];
        weights[f].elements[e] =
            within(rule(weights[f].elements[e], sums[f][e] * scale, values), bound);
#pragma unroll
        for (int s = 0; s < kSlots; ++s) slots[f][s].elements[e] = values[s];
      }
      put<float>(target.values + rows[f] * target.dim * 4, span, weights[f]);
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        put<float>(target.slots[s] + rows[f] * target.dim * 4, span, slots[f][s]);
    }
  }
};

// The rate that each row's slot and the mean square of its gradient make. All threads of a warp
// call it.
template <class Rule>
__device__ __forceinline__ void row_rates(const Rule& rule, const Share<kFlight>& share,
                                          const float (&squares)[kFlight],
                                          float (&rates)[kFlight]) {
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    float sum = squares[f];
#pragma unroll 1
    for (int distance = share.lanes / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    float* at = reinterpret_cast<float*>(share.target->slots[0]) + share.segments.row[f];
    const bool is_row = share.segments.row[f] >= 0;
    float slot = is_row ? *at : 0.f;
    __syncwarp();
    rates[f] = rule.rate_of(&slot, sum / static_cast<float>(share.target->dim));
    if (share.lane == 0 && is_row) *at = slot;
  }
}

template <class Rule>
__device__ __forceinline__ void update_rows(const Rule& rule, const Share<kFlight>& share,
                                            float scale, float bound) {
  const Target& target = *share.target;
  const Segments<kFlight>& segments = share.segments;
  const int accesses = accesses_of(target);
  i64 own[kFlight];
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    own[f] = segments.row[f] >= 0 && segments.along[f] != 0
                 ? target.values + segments.row[f] * target.dim * 4
                 : 0;
    if (target.touched != 0 && share.lane == 0 && segments.row[f] >= 0) {
      reinterpret_cast<unsigned char*>(target.touched)[segments.row[f]] = 1;
    }
  }
  float rates[kFlight] = {}, sums[kFlight][kWidth];
  if constexpr (Rule::kRowwise) {
    float squares[kFlight] = {};
#pragma unroll 1
    for (int access = share.lane; access < accesses; access += share.lanes) {
      const Span span(access, target.dim);
      gradients_of<kFlight>(share, span, own, kFloat32, sums);
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e)
          squares[f] += e < span.count ? (sums[f][e] * scale) * (sums[f][e] * scale) : 0.f;
      }
    }
    row_rates(rule, share, squares, rates);
  }
#pragma unroll 1
  for (int access = share.lane; access < accesses; access += share.lanes) {
    const Span span(access, target.dim);
    // Before the sums: what they wait for is a chain of four.
    Held<Rule, kFlight> held(target, segments.row, span);
    // A row of one round has its sums already.
    if (!Rule::kRowwise || accesses > share.lanes)
      gradients_of<kFlight>(share, span, own, kFloat32, sums);
    held.update(rule, target, segments.row, span, scale, bound, rates, sums);
  }
}

// `options`: the gradient's scale, the weights' bound, then the rule's.
#define UPDATE(name, Rule)                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT(Rule))          \
      update_##name(WORK_PARAMETERS, const float* __restrict__ options) {         \
    const float scale = options[0], bound = options[1];                           \
    const Rule rule(options + 2);                                                 \
    for_segments<kFlight, false>(WORK, SOURCE, [=](const Share<kFlight>& share) { \
      update_rows(rule, share, scale, bound);                                     \
    });                                                                           \
  }

UPDATE(sgd, SGD)
UPDATE(momentum, Momentum)
UPDATE(adagrad, Adagrad)
UPDATE(rowwise_adagrad, RowwiseAdagrad)
UPDATE(adam, Adam)
UPDATE(ftrl, Ftrl)
UPDATE(rmsprop, RMSProp)
UPDATE(centered_rmsprop, CenteredRMSProp)

// Adam with a gradient of 0, of the rows that aren't touched; none is, afterwards.
extern "C" __global__ void __launch_bounds__(kThreads)
    adam_decay(const Target* __restrict__ targets, int target_count,
               const float* __restrict__ options) {
  const Target& target = holding(targets, target_count, blockIdx.x);
  const Adam adam(options + 2);
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
  const float rates[1] = {}, none[1][kWidth] = {};
  for (int access = lane; access < accesses_of(target); access += lanes) {
    const Span span(access, target.dim);
    Held<Adam, 1> held(target, rows, span);
    held.update(adam, target, rows, span, 1, options[1], rates, none);
  }
}
