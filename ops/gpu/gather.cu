// Rows of many tables into one buffer. gather.py describes and launches the kernel.
//
// A row is read by a group of lanes, a power of two that covers it, at most a warp; a thread has
// kFlight rows in flight. What neighbouring groups write lies side by side.

#include "packs.cuh"
#include "segments.cuh"

constexpr int kFlight = 4;
constexpr int kRounds = 2;  // of kFlight rows, for each group of a tile

struct Piece {
  i64 tile;        // its first one
  i64 first, end;  // of its rows
  i64 table;       // address
  i64 table_rows;
  i64 dim;
  i64 out;      // element
  i64 lanes;    // of a group
  i64 vectors;  // whether all addresses allow accesses of four elements
};

template <int kCount>
__device__ __forceinline__ void gather_tile(const Piece& piece, const i64* __restrict__ rows,
                                            float* __restrict__ out) {
  const int lanes = static_cast<int>(piece.lanes), lane = threadIdx.x & (lanes - 1),
            groups = kThreads / lanes;
  const int accesses = static_cast<int>(piece.dim / kCount);
  const i64 begin =
      piece.first + (blockIdx.x - piece.tile) * (groups * kFlight * kRounds) + threadIdx.x / lanes;
  const float* table = reinterpret_cast<const float*>(piece.table);
  for (int round = 0; round < kRounds; ++round) {
    const i64 first = begin + round * (groups * kFlight);
    if (first >= piece.end) return;
    const float* from[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const i64 at = first + f * groups;
      const i64 row = at < piece.end ? rows[at] : -1;
      from[f] = row >= 0 && row < piece.table_rows ? table + row * piece.dim : nullptr;
    }
    float* to = out + piece.out + (first - piece.first) * piece.dim;
    const i64 stride = groups * piece.dim;
    for (int access = lane; access < accesses; access += lanes) {
      Pack<kCount> values[kFlight];
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        values[f].words = {};
        if (from[f] != nullptr) values[f] = load<kCount>(from[f] + access * kCount);
      }
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        if (first + f * groups < piece.end)
          store<kCount>(to + f * stride + access * kCount, values[f]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gather_rows(const Piece* __restrict__ pieces, int count, const i64* __restrict__ rows,
                float* __restrict__ out) {
  const Piece& piece = holding(pieces, count, blockIdx.x);
  if (piece.vectors != 0) {
    gather_tile<4>(piece, rows, out);
  } else {
    gather_tile<1>(piece, rows, out);
  }
}
