// Sums of rows by segment, written one after the other; and of the pieces of long segments. sums.py
// describes and launches them.

#include "targets.cuh"

constexpr int kFlight = 4;

// One block for each piece, by turns: its partial sum.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    sum_pieces(WORK_PARAMETERS, const Piece* __restrict__ pieces, float* __restrict__ partials,
               float* __restrict__ partials_along) {
  __shared__ float shared[kThreads * kWidth];
  const Work work = WORK;
  const Source source = SOURCE;
  for (u32 p = blockIdx.x; p < counters[1]; p += gridDim.x) {
    const Piece piece = pieces[p];
    const Target& target = target_of(work, piece.row);
    const int lanes = static_cast<int>(target.lanes), groups = kThreads / lanes;
    const Group group = {lanes, static_cast<int>(threadIdx.x) & (lanes - 1)};
    const Range range = cut({piece.first, piece.end},
                            threadIdx.x / lanes * kFlight + group.lane % kFlight, groups * kFlight);
    for (int base = 0; base < accesses_of(target); base += lanes) {
      float sums[kFlight][kWidth];
      const Span span(base + group.lane, target.dim);
      sum_ranges<kFlight, false>(group, range, span, target.dim,
                                 FindOfTarget{source, target, target.dim * kFloatBytes}, sums);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        shared[threadIdx.x * kWidth + e] = (sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e]);
      }
      __syncthreads();
      const int first = base * kWidth;
      for (int at = static_cast<int>(threadIdx.x); at < lanes * kWidth; at += kThreads) {
        if (first + at >= target.dim) continue;
        float sum = 0;
        for (int g = 0; g < groups; ++g) sum += shared[g * lanes * kWidth + at];
        partials[p * width + first + at] = sum;
      }
      __syncthreads();
    }
    if (along != nullptr && threadIdx.x == 0)
      partials_along[p] = sum_along(along, order, piece.first, piece.end);
  }
}

template <bool kLong>
__device__ __forceinline__ void write_sums(const Share<kFlight>& share, float scale) {
  const Target& target = *share.target;
#pragma unroll 1
  for (int base = 0; base < accesses_of(target); base += share.group.lanes) {
    float sums[kFlight][kWidth];
    const Span span(base + share.group.lane, target.dim);
    if (kLong) {
      sum_long(share, span, sums);
    } else {
      sum_segments(share, span, sums);
    }
    add_own(share, span, target.slots[0], sums);
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      Pack<kWidth> scaled;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) scaled.elements[e] = sums[f][e] * scale;
      if (share.row[f] < 0) continue;
      put<false>(target.values + share.row[f] * target.dim * kFloatBytes, span, scaled);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) sum_rows(WORK_PARAMETERS, float scale) {
  for_segments<kFlight, true>(
      WORK, SOURCE, [=](const Share<kFlight>& share) { write_sums<false>(share, scale); });
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sum_rows_long(WORK_PARAMETERS, float scale) {
  for_longs<kFlight>(WORK, SOURCE,
                     [=](const Share<kFlight>& share) { write_sums<true>(share, scale); });
}
