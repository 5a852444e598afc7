// Rows that gradients are summed for: what all updates have in common.
//
// A segment is what one row has of the occurrences. A group of lanes has kFlight segments in
// flight. Segments that are long (occurrences.cuh) are left out; blocks sum their pieces, and the
// same kernel then works on the sums of these: a warp where they are few, else a block.

#include "sums.cuh"

constexpr int kMostSlots = 3;
constexpr u32 kFew = 8;  // pieces of a segment that a warp sums

struct Target {
  i64 tile;        // its first one
  i64 first, end;  // of the segments
  i64 dim;
  i64 lanes;   // of a group
  i64 values;  // addresses: of the table, or of what is written
  i64 count;   // of its rows
  i64 slots[kMostSlots];
  i64 touched;    // address of a byte for each row that is set, or 0
  i64 run, runs;  // where the rows that are summed for it are, among the source's runs
};

// The arguments of the kernels that work by tiles, and of those that work on long segments.
struct Work {
  const Target* targets;
  int target_count;
  const int* offsets;      // of segments in the places; null: each is one place
  const i64* const* rows;  // which row each segment of a target is of; null: they are in order
  const u32* counters;
  const Long* longs;
  const float* along;  // of each occurrence: how much of the row itself belongs to its gradient;
                       // null: nothing
  const float* partial_along;
  i64 width;  // of a row of partial sums, which is the run after the source's
};

#define WORK_PARAMETERS                                                                  \
  const Target *__restrict__ targets, int target_count, const int *__restrict__ offsets, \
      const i64 *const *__restrict__ rows, const u32 *__restrict__ counters,             \
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

// Finds the rows of places that are summed for a target: the fewer runs it has, the sooner. Which
// these are is read again for each row, together with its term, as there are few registers.
struct FindOfTarget {
  const Source& source;
  const Target& target;
  i64 pitch;  // bytes between rows

  __device__ __forceinline__ Found operator()(u32 place) const {
    const Source of = {source.order, source.terms, source.runs + target.run,
                       static_cast<int>(target.runs)};
    return FindPlace{of, pitch}(place);
  }
};

__device__ __forceinline__ int accesses_of(const Target& target) {
  return static_cast<int>((target.dim + kWidth - 1) / kWidth);
}

__device__ __forceinline__ float sum_along(const float* along, const u32* order, u32 begin,
                                           u32 end) {
  float sum = 0;
#pragma unroll 1
  for (u32 place = begin; place < end; ++place)
    sum += along[order == nullptr ? place : order[place]];
  return sum;
}

__device__ __forceinline__ i64 row_of(const Work& work, const Target& target, i64 segment) {
  const i64 at = segment - target.first,
            row = work.rows == nullptr ? at : work.rows[&target - work.targets][at];
  return row >= 0 && row < target.count ? row : -1;
}

// The work of a group of lanes.
template <int kFlight>
struct Share {
  const Target* target;
  Group group;
  i64 row[kFlight];      // -1 for none
  float along[kFlight];  // of the row itself
  Range range;           // of the places of flight lane % kFlight
  Source source;
  i64 pitch;  // bytes between the source's rows
  u32 warps;  // that have parts of one long segment, in all flights; the first has the row
};

// Finds the segments of a group in a tile. Each lane looks one of the flights up.
template <int kFlight, bool kEmpty>
__device__ __forceinline__ void find_segments(const Work& work, Share<kFlight>& share) {
  const Target& target = *share.target;
  const int lanes = share.group.lanes, groups = kThreads / lanes;
  const i64 first = target.first + (blockIdx.x - target.tile) * (groups * kFlight) +
                    threadIdx.x / lanes,
            segment = first + share.group.lane % kFlight * groups,
            at = segment < target.end ? segment : target.first;
  const bool once = work.offsets == nullptr;
  const u32 begin = static_cast<u32>(once ? at : work.offsets[at]),
            end = once ? begin + 1 : static_cast<u32>(work.offsets[at + 1]);
  i64 row = row_of(work, target, at);
  if (segment >= target.end || end - begin > kLong || (!kEmpty && begin == end)) row = -1;
  share.range = {begin, row < 0 ? begin : end};
  share.warps = 1;
  float along = 0;
  if (work.along != nullptr && row >= 0)
    along = sum_along(work.along, share.source.order, begin, end);
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    share.row[f] = __shfl_sync(kAllLanes, row, f, lanes);
    share.along[f] = __shfl_sync(kAllLanes, along, f, lanes);
  }
}

// Has a warp, or all warps of a block, work on the partial sums of a long segment.
template <int kFlight>
__device__ __forceinline__ void cut_long(const Work& work, const Long& of, u32 warps,
                                         Share<kFlight>& share) {
  const Range pieces = {of.first, of.first + of.count};
  const u32 warp = warps == 1 ? 0 : threadIdx.x / 32;
  share.warps = warps;
  share.range = cut(pieces, warp * kFlight + share.group.lane % kFlight, warps * kFlight);
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    share.row[f] = -1;
    share.along[f] = 0;
  }
  if (warp != 0) return;
  share.row[0] = row_of(work, *share.target, of.row);
  if (work.along != nullptr)
    share.along[0] = sum_along(work.partial_along, nullptr, pieces.begin, pieces.end);
}

// Calls step(share) for the segments of this thread's group. All threads of a warp call it
// together.
template <int kFlight, bool kEmpty, class Step>
__device__ __forceinline__ void for_segments(const Work& work, const Source& source, Step step) {
  Share<kFlight> share;
  share.target = &holding(work.targets, work.target_count, blockIdx.x);
  const int lanes = static_cast<int>(share.target->lanes);
  share.group = {lanes, static_cast<int>(threadIdx.x) & (lanes - 1)};
  share.source = source;
  share.pitch = share.target->dim * kFloatBytes;
  find_segments<kFlight, kEmpty>(work, share);
  step(share);
}

// Calls step(share) for the long segments of this thread's warp, then for those of its block. All
// threads of a block call it together.
template <int kFlight, class Step>
__device__ __forceinline__ void for_longs(const Work& work, const Source& source, Step step) {
  const u32 longs = work.counters[0],
            by_warps = (longs + gridDim.x * kWarps - 1) / (gridDim.x * kWarps),
            by_blocks = (longs + gridDim.x - 1) / gridDim.x;
  Share<kFlight> share;
  share.group = {32, static_cast<int>(threadIdx.x % 32)};
  share.source = {nullptr, nullptr, source.runs + source.run_count, 1};
  share.pitch = work.width * kFloatBytes;
  for (u32 round = 0; round < by_warps + by_blocks; ++round) {
    const u32 warps = round < by_warps ? 1 : kWarps,
              at = warps == 1 ? (round * gridDim.x + blockIdx.x) * kWarps + threadIdx.x / 32
                              : (round - by_warps) * gridDim.x + blockIdx.x;
    if (at >= longs) continue;
    const Long of = work.longs[at];
    if ((of.count <= kFew) != (warps == 1)) continue;
    share.target = &target_of(work, of.row);
    cut_long(work, of, warps, share);
    step(share);
  }
}

// Sums the gradients of kFlight segments, of the elements of `span`.
template <int kFlight>
__device__ __forceinline__ void sum_segments(const Share<kFlight>& share, const Span& span,
                                             float (&sums)[kFlight][kWidth]) {
  sum_ranges<kFlight, false>(share.group, share.range, span, share.target->dim,
                             FindOfTarget{share.source, *share.target, share.pitch}, sums);
}

// Sums the partial sums of a long segment; the first flight of the first warp then has their sum.
// All warps that have parts of it call it together.
template <int kFlight>
__device__ __forceinline__ void sum_long(const Share<kFlight>& share, const Span& span,
                                         float (&sums)[kFlight][kWidth]) {
  __shared__ float parts[kThreads * kWidth];
  sum_ranges<kFlight, false>(share.group, share.range, span, share.target->dim,
                             FindPlace{share.source, share.pitch}, sums);
#pragma unroll
  for (int f = 1; f < kFlight; ++f) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[0][e] += sums[f][e];
  }
  if (share.warps == 1) return;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) parts[e * kThreads + threadIdx.x] = sums[0][e];
  __syncthreads();
  if (threadIdx.x < 32) {
    for (u32 warp = 1; warp < share.warps; ++warp) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[0][e] += parts[e * kThreads + warp * 32 + threadIdx.x];
    }
  }
  __syncthreads();
}

// Adds what of the rows themselves, which `values` has one after the other, belongs to their
// gradients; 0: nothing.
template <int kFlight>
__device__ __forceinline__ void add_own(const Share<kFlight>& share, const Span& span, i64 values,
                                        float (&sums)[kFlight][kWidth]) {
  i64 own[kFlight];
  bool any = false;
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    const bool has = values != 0 && share.row[f] >= 0 && share.along[f] != 0;
    own[f] = has ? values + share.row[f] * share.target->dim * kFloatBytes : 0;
    any = any || has;
  }
  if (!any) return;
  float rows[kFlight][kWidth];
  fetch<false>(own, span, rows);
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[f][e] += own[f] != 0 ? share.along[f] * rows[f][e] : 0.f;
  }
}
