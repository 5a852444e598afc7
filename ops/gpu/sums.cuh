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
struct Term {
  u32 row;
  float factor;
};

struct Source {
  const u32* order;   // which occurrence has a place; null: they are in order
  const Term* terms;  // of each occurrence; null: the row of that number, once
  const Run* runs;    // of rows, side by side
  int run_count;
};

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
  const i64 at = row - runs[low].first;
  return at >= 0 && at < runs[low].count ? runs[low].address + at * pitch : 0;
}

// A thread has 4 elements of a row, or fewer at its end. They are one access where the row's
// address allows it: of rows side by side whose dimension is odd some do, and none keeps the rows
// of another dimension from it.
constexpr int kWidth = 4;
constexpr int kFloatBytes = 4;

struct Span {
  int element;  // the first
  int count;

  __device__ __forceinline__ Span(int access, i64 dim)
      : element(access * kWidth), count(min(kWidth, static_cast<int>(dim) - access * kWidth)) {}

  __device__ __forceinline__ bool is_whole(const float* at) const {
    return count == kWidth && reinterpret_cast<u64>(at) % (kWidth * kFloatBytes) == 0;
  }
};

// Elements of kFlight rows, all fetched at once; zeros where the address is 0.
template <int kFlight>
__device__ __forceinline__ void fetch(const i64 (&addresses)[kFlight], const Span& span,
                                      float (&values)[kFlight][kWidth]) {
  Pack<kWidth> packs[kFlight];
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    packs[f].words = {};
    if (addresses[f] == 0) continue;
    const float* from = reinterpret_cast<const float*>(addresses[f]) + span.element;
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

__device__ __forceinline__ void put(i64 address, const Span& span, const Pack<kWidth>& values) {
  float* to = reinterpret_cast<float*>(address) + span.element;
  if (span.is_whole(to)) {
    store<kWidth>(to, values);
  } else {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if (e < span.count) to[e] = values.elements[e];
    }
  }
}

// Sums the rows of each of kFlight ranges of places, of the elements of `span`. `pitch`
// bytes are between rows.
template <int kFlight>
__device__ __forceinline__ void sum_places(const Source& source, const u32 (&begin)[kFlight],
                                           const u32 (&end)[kFlight], i64 pitch, const Span& span,
                                           float (&sums)[kFlight][kWidth]) {
  u32 longest = 0;
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    longest = max(longest, end[f] - begin[f]);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[f][e] = 0;
  }
#pragma unroll 1
  for (u32 turn = 0; turn < longest; ++turn) {
    i64 addresses[kFlight];
    float factors[kFlight], values[kFlight][kWidth];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const u32 place = begin[f] + turn;
      addresses[f] = 0;
      factors[f] = 1;
      if (place >= end[f]) continue;
      i64 row = source.order == nullptr ? place : source.order[place];
      if (source.terms != nullptr) {
        const Term term = source.terms[row];
        row = term.row;
        factors[f] = term.factor;
      }
      addresses[f] = address_of(source.runs, source.run_count, row, pitch);
    }
    fetch<kFlight>(addresses, span, values);
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      // Not even an infinite factor makes something of a row that isn't there.
      if (addresses[f] == 0) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[f][e] += factors[f] * values[f][e];
    }
  }
}

// Cuts a range of places into kFlight equal parts.
template <int kFlight>
__device__ __forceinline__ void cut(u32 first, u32 end, u32 part, u32 parts, u32 (&begins)[kFlight],
                                    u32 (&ends)[kFlight]) {
  const u32 each = (end - first + parts - 1) / parts;
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    begins[f] = min(first + (part + f) * each, end);
    ends[f] = min(begins[f] + each, end);
  }
}
