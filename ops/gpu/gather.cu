// Rows of many tables into one buffer. gather.py describes and launches gather_rows; spread_rows
// does the same by numbers of 32 bits, and multiplies, as scale_values does alone.
//
// A row is read by a group of lanes, a power of two that covers it, at most a warp; a thread has
// kFlight rows in flight. What neighbouring groups write lies side by side. A block first reads the
// numbers of all its rows at once, each by one thread.

#include "packs.cuh"
#include "segments.cuh"

constexpr int kFlight = 4;
constexpr int kRounds = 2;  // of kFlight rows, for each group of a tile

struct Piece {
  i64 tile;   // its first one
  i64 rows;   // address of their numbers
  i64 count;  // of its rows
  i64 table;  // address
  i64 table_rows;
  i64 dim;
  i64 out;      // element
  i64 lanes;    // of a group
  i64 vectors;  // whether all addresses allow accesses of four elements
};

// The blocks that a multiprocessor holds. For GPUs newer than the H100 and H200 compilers need more
// registers than five blocks leave a thread; the rows that four have in flight fill the bandwidth.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocks = 4;
#else
constexpr int kBlocks = 5;
#endif

constexpr int kMostRows = kThreads * kFlight * kRounds;  // of a tile

template <int kCount, bool kScales>
__device__ __forceinline__ void gather_tile(const Piece& piece, const i64* from, int count,
                                            float* out, float scale) {
  const int lanes = static_cast<int>(piece.lanes), lane = threadIdx.x & (lanes - 1),
            groups = kThreads / lanes, accesses = static_cast<int>(piece.dim / kCount);
#pragma unroll 1
  for (int first = threadIdx.x / lanes; first < count; first += groups * kFlight) {
    const float* rows[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int at = first + f * groups;
      rows[f] = reinterpret_cast<const float*>(at < count ? from[at] : 0);
    }
    float* to = out + first * piece.dim;
    const i64 stride = groups * piece.dim;
#pragma unroll 1
    for (int access = lane; access < accesses; access += lanes) {
      Pack<kCount> values[kFlight];
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        values[f].words = {};
        if (rows[f] != nullptr) values[f] = load<kCount>(rows[f] + access * kCount);
      }
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        if (kScales) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) values[f].elements[e] *= scale;
        }
        if (first + f * groups < count) store<kCount>(to + f * stride + access * kCount, values[f]);
      }
    }
  }
}

// Works on the tile of a block. A Number is what rows are numbered by.
template <class Number, bool kScales>
__device__ __forceinline__ void gather_block(const Piece* pieces, int count, float* out,
                                             float scale, i64* from) {
  const Piece piece = holding(pieces, count, blockIdx.x);
  const int most = kMostRows / static_cast<int>(piece.lanes);
  const i64 first = (blockIdx.x - piece.tile) * most, left = piece.count - first;
  const Number* rows = reinterpret_cast<const Number*>(piece.rows);
  const int here = left < most ? static_cast<int>(left) : most;
#pragma unroll 4
  for (int at = threadIdx.x; at < here; at += kThreads) {
    const i64 row = rows[first + at];
    const bool is_there = row >= 0 && row < piece.table_rows;
    from[at] = is_there ? piece.table + row * piece.dim * static_cast<i64>(sizeof(float)) : 0;
  }
  __syncthreads();
  float* to = out + piece.out + first * piece.dim;
  if (piece.vectors != 0) {
    gather_tile<4, kScales>(piece, from, here, to, scale);
  } else {
    gather_tile<1, kScales>(piece, from, here, to, scale);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    gather_rows(const Piece* __restrict__ pieces, int count, float* __restrict__ out) {
  __shared__ i64 from[kMostRows];  // addresses, 0 for none
  gather_block<i64, false>(pieces, count, out, 1, from);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    spread_rows(const Piece* __restrict__ pieces, int count, float* __restrict__ out, float scale) {
  __shared__ i64 from[kMostRows];
  gather_block<int, true>(pieces, count, out, scale, from);
}

// Multiplies values where they are.
extern "C" __global__ void __launch_bounds__(kThreads)
    scale_values(float* __restrict__ values, i64 count, float scale) {
  const i64 first = static_cast<i64>(blockIdx.x) * kTile + threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    if (at < count) values[at] *= scale;
  }
}
