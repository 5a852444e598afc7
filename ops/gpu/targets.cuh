// Rows that gradients are summed for: what all updates have in common.
//
// A segment is what one row has of the occurrences. A group of lanes, a power of two that covers a
// row, has kFlight segments in flight. Segments that are long (occurrences.cuh) are left out;
// blocks sum their pieces, and the same kernel then works on these.

#include "sums.cuh"

constexpr int kMostSlots = 3;

struct Target {
  i64 tile;        // its first one
  i64 first, end;  // of the segments
  i64 dim;
  i64 lanes;   // of a group
  i64 values;  // addresses: of the table, or of what is written
  i64 count;   // of its rows
  i64 slots[kMostSlots];
  i64 touched;  // address of a byte for each row that is set, or 0
};

// The arguments of the launch with tiles, and of the one with long segments.
struct Work {
  const Target* targets;
  int target_count;
  const int* offsets;  // of segments in the places
  const i64* rows;     // which row each segment is of; null: they are in order
  const u32* counters;
  const Long* longs;   // null: by tiles
  const float* along;  // of each occurrence: how much of the row itself belongs to its gradient;
                       // null: nothing
  const float* partial_along;
  i64 width;  // of a row of partial sums, which is the run after the source's
};

#define WORK_PARAMETERS                                                                  \
  const Target *__restrict__ targets, int target_count, const int *__restrict__ offsets, \
      const i64 *__restrict__ rows, const u32 *__restrict__ counters,                    \
      const Long *__restrict__ longs, const float *__restrict__ along,                   \
      const float *__restrict__ partial_along, i64 width, const u32 *__restrict__ order, \
      const Term *__restrict__ terms, const Run *__restrict__ runs, int run_count
#define WORK \
  Work { targets, target_count, offsets, rows, counters, longs, along, partial_along, width }
#define SOURCE \
  Source { order, terms, runs, run_count }

__device__ __forceinline__ const Target& target_of(const Work& work, i64 segment) {
  int low = 0, high = work.target_count;
#pragma unroll 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (work.targets[middle].first <= segment) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return work.targets[low];
}

__device__ __forceinline__ int accesses_of(const Target& target) {
  return static_cast<int>((target.dim + kWidth - 1) / kWidth);
}

template <int kFlight>
struct Segments {
  i64 row[kFlight];  // -1 for none
  u32 begin[kFlight], end[kFlight];
  float along[kFlight];
};

__device__ __forceinline__ float sum_along(const float* along, const u32* order, u32 begin,
                                           u32 end) {
  float sum = 0;
#pragma unroll 1
  for (u32 place = begin; place < end; ++place)
    sum += along[order == nullptr ? place : order[place]];
  return sum;
}

__device__ __forceinline__ i64 row_of(const Work& work, const Target& target, i64 segment) {
  const i64 row = work.rows == nullptr ? segment - target.first : work.rows[segment];
  return row >= 0 && row < target.count ? row : -1;
}

// The work of a group of lanes.
template <int kFlight>
struct Share {
  const Target* target;
  Segments<kFlight> segments;
  Source source;
  i64 pitch;  // bytes between the source's rows
  int lanes, lane;
  bool merged;  // all flights have parts of one segment, of which only the first has a row
};

// Calls step(share) for what this thread's group works on. All threads of a warp call it together.
template <int kFlight, bool kEmpty, class Step>
__device__ __forceinline__ void for_segments(const Work& work, const Source& source, Step step) {
  const bool tiles = work.longs == nullptr;
  Share<kFlight> share;
  Segments<kFlight>& segments = share.segments;
  for (u32 at = blockIdx.x * kWarps + threadIdx.x / 32; tiles || at < work.counters[0];
       at += gridDim.x * kWarps) {
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      segments.row[f] = -1;
      segments.begin[f] = segments.end[f] = 0;
      segments.along[f] = 0;
    }
    if (tiles) {
      const Target& target = holding(work.targets, work.target_count, blockIdx.x);
      const int lanes = static_cast<int>(target.lanes), groups = kThreads / lanes;
      const i64 first =
          target.first + (blockIdx.x - target.tile) * (groups * kFlight) + threadIdx.x / lanes;
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        const i64 segment = first + f * groups;
        if (segment >= target.end) continue;
        const u32 begin = static_cast<u32>(work.offsets[segment]),
                  end = static_cast<u32>(work.offsets[segment + 1]);
        if (end - begin > kLong || (!kEmpty && begin == end)) continue;
        segments.row[f] = row_of(work, target, segment);
        if (segments.row[f] < 0) continue;
        segments.begin[f] = begin;
        segments.end[f] = end;
        if (work.along != nullptr)
          segments.along[f] = sum_along(work.along, source.order, begin, end);
      }
      share.target = &target;
      share.lanes = lanes;
      share.source = source;
      share.pitch = target.dim * kFloatBytes;
    } else {
      const Long of = work.longs[at];
      share.target = &target_of(work, of.row);
      share.lanes = 32;
      share.source = {nullptr, nullptr, source.runs + source.run_count, 1};
      share.pitch = work.width * kFloatBytes;
      cut(of.first, of.first + of.count, 0, kFlight, segments.begin, segments.end);
      segments.row[0] = row_of(work, *share.target, of.row);
      if (work.along != nullptr)
        segments.along[0] = sum_along(work.partial_along, nullptr, of.first, of.first + of.count);
    }
    share.merged = !tiles;
    share.lane = static_cast<int>(threadIdx.x) & (share.lanes - 1);
    step(share);
    if (tiles) return;
  }
}

// Sums the gradients of kFlight segments, of the elements of `span`.
template <int kFlight>
__device__ __forceinline__ void sum_segments(const Share<kFlight>& share, const Span& span,
                                             float (&sums)[kFlight][kWidth]) {
  sum_places<kFlight>(share.source, share.segments.begin, share.segments.end, share.pitch, span,
                      sums);
  if (share.merged) {
#pragma unroll
    for (int f = 1; f < kFlight; ++f) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[0][e] += sums[f][e];
    }
  }
}

// Adds what of the rows themselves belongs to their gradients. `own`: addresses of these rows; 0
// for none.
template <int kFlight>
__device__ __forceinline__ void add_own(const Share<kFlight>& share, const Span& span,
                                        const i64 (&own)[kFlight], float (&sums)[kFlight][kWidth]) {
  bool any = false;
#pragma unroll
  for (int f = 0; f < kFlight; ++f) any = any || own[f] != 0;
  if (!any) return;
  float values[kFlight][kWidth];
  fetch<kFlight>(own, span, values);
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      sums[f][e] += own[f] != 0 ? share.segments.along[f] * values[f][e] : 0.f;
  }
}
