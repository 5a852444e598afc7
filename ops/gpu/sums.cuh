// Sums of rows by segment, and where these rows are.

#include "occurrences.cuh"
#include "packs.cuh"
#include "segments.cuh"

struct Run {
  i64 first;  // number of its first row
  i64 count;
  i64 address;  // of that row
};

// A place among the occurrences stands for a row that is multiplied.
struct __align__(8) Term {
  u32 row;
  float factor;
};

struct Source {
  const u32* order;   // which occurrence has a place; null: they are in order
  const Term* terms;  // of each occurrence; null: the row of that number, once
  const Run* runs;    // of rows, side by side
  int run_count;
};

__device__ __forceinline__ i64 address_in(const Run& run, i64 row, i64 pitch) {
  const i64 at = row - run.first;
  return at >= 0 && at < run.count ? run.address + at * pitch : 0;
}

// Finds the address of a row; 0 if there is no such row.
__device__ __forceinline__ i64 address_of(const Run* runs, int count, i64 row, i64 pitch) {
  int low = 0, high = count;
#pragma unroll 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (runs[middle].first <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const Run run = runs[low];
  return address_in(run, row, pitch);
}

// A thread has 4 elements of a row, fewer at its end, and none after that. They are one access
// where the row's address allows it: of rows side by side whose dimension is odd some do, and none
// keeps the rows of another dimension from it.
constexpr int kWidth = 4;
constexpr int kFloatBytes = 4;
constexpr int kAccessBytes = kWidth * kFloatBytes;

struct Span {
  int element;  // the first
  int count;    // none if it is not positive

  __device__ __forceinline__ Span(int access, i64 dim)
      : element(access * kWidth), count(min(kWidth, static_cast<int>(dim) - access * kWidth)) {}

  __device__ __forceinline__ bool is_whole(const float* at) const {
    return count == kWidth && reinterpret_cast<u64>(at) % kAccessBytes == 0;
  }
};

// Elements of kFlight rows, all fetched at once; zeros where the address is 0. kWhole: all that the
// threads of a warp have of these rows are single accesses, of which none branches.
template <bool kWhole, int kFlight>
__device__ __forceinline__ void fetch(const i64 (&addresses)[kFlight], const Span& span,
                                      float (&values)[kFlight][kWidth]) {
  Pack<kWidth> packs[kFlight];
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    const float* from = reinterpret_cast<const float*>(addresses[f]) + span.element;
    if (kWhole) {
      packs[f] = load_where(addresses[f] != 0 && span.count > 0, from);
      continue;
    }
    packs[f].words = {};
    if (addresses[f] == 0) continue;
    if (span.is_whole(from)) {
      packs[f] = load<kWidth>(from);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if (e < span.count) packs[f].elements[e] = from[e];
      }
    }
  }
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) values[f][e] = packs[f].elements[e];
  }
}

template <bool kWhole>
__device__ __forceinline__ void put(i64 address, const Span& span, const Pack<kWidth>& values) {
  float* to = reinterpret_cast<float*>(address) + span.element;
  if (kWhole ? span.count > 0 : span.is_whole(to)) {
    store<kWidth>(to, values);
  } else if (!kWhole) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if (e < span.count) to[e] = values.elements[e];
    }
  }
}

// A group of lanes: as many as a row has accesses, a power of two, at least kFewestLanes, which is
// the most rows that are in flight.
constexpr int kFewestLanes = 4;

struct Group {
  int lanes, lane;
};

struct Range {
  u32 begin, end;
};

// Where the row of a place is, 0 for nowhere, and by what it is multiplied.
struct Found {
  i64 address;
  float factor;
};

// Adds the rows that kFlight lanes have found, from lane `first` on, to the sums: all fetched at
// once. kOnes: all factors are 1.
template <int kFlight, bool kOnes, bool kWhole>
__device__ __forceinline__ void add_found(const Group& group, int first, const Found& found,
                                          const Span& span, float (&sums)[kFlight][kWidth]) {
  i64 addresses[kFlight];
  float factors[kFlight], values[kFlight][kWidth];
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    addresses[f] = __shfl_sync(kAllLanes, found.address, first + f, group.lanes);
    factors[f] = kOnes ? 1 : __shfl_sync(kAllLanes, found.factor, first + f, group.lanes);
  }
  fetch<kWhole>(addresses, span, values);
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    // Not even an infinite factor makes something of a missing row.
    if (!kOnes && addresses[f] == 0) continue;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[f][e] += kOnes ? values[f][e] : factors[f] * values[f][e];
  }
}

// Adds the rows of some turns, which lanes have found, to the sums.
template <int kFlight, bool kOnes, bool kWhole>
__device__ __forceinline__ void add_turns(const Group& group, const Range& range,
                                          const Found& found, const Span& span,
                                          float (&sums)[kFlight][kWidth]) {
#pragma unroll 1
  for (int first = 0; first < group.lanes; first += kFlight) {
    if (!__any_sync(kAllLanes, range.begin + first / kFlight < range.end)) return;
    add_found<kFlight, kOnes, kWhole>(group, first, found, span, sums);
  }
}

// Whether all lanes of a warp have found rows whose accesses are whole.
__device__ __forceinline__ bool reads_whole(const Found& found, i64 dim) {
  return __all_sync(kAllLanes, dim % kWidth == 0 && found.address % kAccessBytes == 0);
}

template <int kFlight>
__device__ __forceinline__ void set_zero(float (&sums)[kFlight][kWidth]) {
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[f][e] = 0;
  }
}

// Sums the rows of each of kFlight ranges of places, of the elements of `span`. `range` is that of
// flight lane % kFlight. All lanes of a warp call it together.
//
// A lane finds the row of one place for its group: so many turns of all ranges at once. What leads
// to a row is then waited for once for all of them, and is read by one lane, not by all. Then the
// rows of each turn are fetched at once.
//
// kPlain: all factors are 1, and all accesses are whole.
template <int kFlight, bool kPlain, class Find>
__device__ __forceinline__ void sum_ranges(const Group& group, Range range, const Span& span,
                                           i64 dim, Find find, float (&sums)[kFlight][kWidth]) {
  static_assert(kFlight <= kFewestLanes, "a lane for each flight");
  set_zero(sums);
  const u32 ahead = static_cast<u32>(group.lane / kFlight);
#pragma unroll 1
  while (__any_sync(kAllLanes, range.begin < range.end)) {
    Found found = {0, 1};
    if (range.begin + ahead < range.end) found = find(range.begin + ahead);
    if (kPlain || reads_whole(found, dim)) {
      add_turns<kFlight, kPlain, true>(group, range, found, span, sums);
    } else {
      add_turns<kFlight, false, false>(group, range, found, span, sums);
    }
    range.begin = min(range.begin + static_cast<u32>(group.lanes / kFlight), range.end);
  }
}

// Finds the rows of places among the occurrences.
struct FindPlace {
  Source source;
  i64 pitch;  // bytes between rows

  __device__ __forceinline__ Found operator()(u32 place) const {
    u32 row = source.order == nullptr ? place : source.order[place];
    float factor = 1;
    if (source.terms != nullptr) {
      const Term term = source.terms[row];
      row = term.row;
      factor = term.factor;
    }
    return {address_of(source.runs, source.run_count, row, pitch), factor};
  }
};

// Cuts a range in equal parts and returns one of them.
__device__ __forceinline__ Range cut(const Range& range, u32 part, u32 parts) {
  const u32 each = (range.end - range.begin + parts - 1) / parts,
            begin = min(range.begin + part * each, range.end);
  return {begin, min(begin + each, range.end)};
}
