// Rows of a buffer into a variable, in place: what gather.cu does, the other way round. The
// compiled operation `ops/native/gpu/write.cc` describes and launches write_rows.
//
// Bytes are copied, whatever they stand for, by accesses of one width. A row is written by a group
// of lanes, a power of two that covers it, at most a warp; a thread takes kFlight rows at once.

#include "segments.cuh"

constexpr int kFlight = 4;

// Rows of `words` words each; a row outside of the variable is left out.
template <class Word>
__device__ __forceinline__ void write_tile(const i64* __restrict__ rows, i64 count,
                                           const char* __restrict__ values,
                                           char* __restrict__ variable, i64 variable_rows,
                                           i64 words, int lanes) {
  const Word* from = reinterpret_cast<const Word*>(values);
  Word* to = reinterpret_cast<Word*>(variable);
  const int lane = threadIdx.x & (lanes - 1), groups = kThreads / lanes;
  const i64 first = static_cast<i64>(blockIdx.x) * groups * kFlight + threadIdx.x / lanes;
  i64 row[kFlight];
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    const i64 at = first + f * groups;
    row[f] = at < count ? rows[at] : -1;
    if (row[f] >= variable_rows) row[f] = -1;
  }
#pragma unroll 1
  for (i64 word = lane; word < words; word += lanes) {
    Word taken[kFlight] = {};
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      if (row[f] >= 0) taken[f] = from[(first + f * groups) * words + word];
    }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      if (row[f] >= 0) to[row[f] * words + word] = taken[f];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    write_rows(const i64* __restrict__ rows, i64 count, const char* __restrict__ values,
               char* __restrict__ variable, i64 variable_rows, i64 words, int lanes, int width) {
  if (width == 16) {
    write_tile<uint4>(rows, count, values, variable, variable_rows, words, lanes);
  } else if (width == 8) {
    write_tile<u64>(rows, count, values, variable, variable_rows, words, lanes);
  } else if (width == 4) {
    write_tile<u32>(rows, count, values, variable, variable_rows, words, lanes);
  } else if (width == 2) {
    write_tile<unsigned short>(rows, count, values, variable, variable_rows, words, lanes);
  } else {
    write_tile<unsigned char>(rows, count, values, variable, variable_rows, words, lanes);
  }
}
