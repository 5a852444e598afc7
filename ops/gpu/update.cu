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
__device__ __forceinline__ Pack<kWidth> read(i64 address, i64 row, i64 dim, const Span& span) {
  Pack<kWidth> pack;
  const float* from = reinterpret_cast<const float*>(address) + row * dim + span.element;
  if (span.is_whole(from)) {
    pack.words = *reinterpret_cast<const uint4*>(from);
  } else {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) pack.elements[e] = e < span.count ? from[e] : 0;
  }
  return pack;
}

// A thread's elements of rows and of their slots.
template <class Rule, int kRows>
struct Held {
  static constexpr int kSlots = Rule::kSlots;
  Pack<kWidth> weights[kRows], slots[kRows][kSlots + 1];

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

  __device__ __forceinline__ void update(const Rule& rule, const Target& target,
                                         const i64 (&rows)[kRows], const Span& span,
                                         const float (&gradients)[kRows][kWidth]) {
#pragma unroll
    for (int f = 0; f < kRows; ++f) {
      if (rows[f] < 0) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        float values[kSlots + 1];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) values[s] = slots[f][s].elements[e];
        weights[f].elements[e] = rule(weights[f].elements[e], gradients[f][e], values);
#pragma unroll
        for (int s = 0; s < kSlots; ++s) slots[f][s].elements[e] = values[s];
      }
      put(target.values + rows[f] * target.dim * kFloatBytes, span, weights[f]);
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        put(target.slots[s] + rows[f] * target.dim * kFloatBytes, span, slots[f][s]);
    }
  }
};

template <class Rule>
__device__ __forceinline__ void update_rows(const Rule& rule, const Share<kFlight>& share) {
  const Target& target = *share.target;
  const Segments<kFlight>& segments = share.segments;
  const int accesses = accesses_of(target);
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    if (target.touched != 0 && share.lane == 0 && segments.row[f] >= 0) {
      reinterpret_cast<unsigned char*>(target.touched)[segments.row[f]] = 1;
    }
  }
#pragma unroll 1
  for (int access = share.lane; access < accesses; access += share.lanes) {
    const Span span(access, target.dim);
    // Before the sums: what they wait for is a chain of four.
    Held<Rule, kFlight> held(target, segments.row, span);
    float sums[kFlight][kWidth];
    sum_segments<kFlight>(share, span, sums);
    held.update(rule, target, segments.row, span, sums);
  }
}

#define UPDATE(name, Rule)                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT(Rule))                          \
      update_##name(WORK_PARAMETERS, const float* __restrict__ options) {                         \
    const Rule rule(options);                                                                     \
    for_segments<kFlight, false>(WORK, SOURCE,                                                    \
                                 [=](const Share<kFlight>& share) { update_rows(rule, share); }); \
  }

UPDATE(sgd, SGD)
UPDATE(momentum, Momentum)
UPDATE(adagrad, Adagrad)
UPDATE(adam, Adam)
UPDATE(ftrl, Ftrl)
UPDATE(rmsprop, RMSProp)
UPDATE(centered_rmsprop, CenteredRMSProp)

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
    Held<Adam, 1> held(target, rows, span);
    held.update(adam, target, rows, span, none);
  }
}
