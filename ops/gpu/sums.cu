// Sums of rows by segment, written one after the other; and of the pieces of long segments. sums.py
// describes and launches them.

#include "targets.cuh"

constexpr int kFlight = 4;

// One block for each piece, by turns: its partial sum.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sum_pieces(WORK_PARAMETERS, const Piece* __restrict__ pieces, float* __restrict__ partials,
               float* __restrict__ partials_along) {
  __shared__ float shared[kThreads * kWidth];
  const Work work = WORK;
  const Source source = SOURCE;
  for (u32 p = blockIdx.x; p < counters[1]; p += gridDim.x) {
    const Piece piece = pieces[p];
    const Target& target = target_of(work, piece.row);
    const u32 lanes = static_cast<u32>(target.lanes), groups = kThreads / lanes,
              lane = threadIdx.x & (lanes - 1);
    const int accesses = accesses_of(target);
    u32 begins[kFlight], ends[kFlight];
    cut(piece.first, piece.end, threadIdx.x / lanes * kFlight, groups * kFlight, begins, ends);
    for (int base = 0; base < accesses; base += static_cast<int>(lanes)) {
      const int access = base + static_cast<int>(lane);
      if (access < accesses) {
        float sums[kFlight][kWidth];
        const Span span(access, target.dim);
        sum_places<kFlight>(source, begins, ends, target.dim * kFloatBytes, span, sums);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          shared[threadIdx.x * kWidth + e] = (sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e]);
        }
      }
      __syncthreads();
      const int first = base * kWidth;
      for (int at = static_cast<int>(threadIdx.x); at < static_cast<int>(lanes) * kWidth;
           at += kThreads) {
        if (first + at >= target.dim) continue;
        float sum = 0;
        for (u32 group = 0; group < groups; ++group) sum += shared[group * lanes * kWidth + at];
        partials[p * width + first + at] = sum;
      }
      __syncthreads();
    }
    if (along != nullptr && threadIdx.x == 0)
      partials_along[p] = sum_along(along, order, piece.first, piece.end);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) sum_rows(WORK_PARAMETERS, float scale) {
  for_segments<kFlight, true>(WORK, SOURCE, [=](const Share<kFlight>& share) {
    const Target& target = *share.target;
    const Segments<kFlight>& segments = share.segments;
    i64 own[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const bool has = target.slots[0] != 0 && segments.row[f] >= 0 && segments.along[f] != 0;
      own[f] = has ? target.slots[0] + segments.row[f] * target.dim * kFloatBytes : 0;
    }
#pragma unroll 1
    for (int access = share.lane; access < accesses_of(target); access += share.lanes) {
      float sums[kFlight][kWidth];
      const Span span(access, target.dim);
      sum_segments<kFlight>(share, span, sums);
      add_own<kFlight>(share, span, own, sums);
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        Pack<kWidth> scaled;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) scaled.elements[e] = sums[f][e] * scale;
        if (segments.row[f] < 0) continue;
        put(target.values + segments.row[f] * target.dim * kFloatBytes, span, scaled);
      }
    }
  });
}
