// Rows of many tables into one buffer. gather.py describes and launches these kernels.
//
// A row is read by a group of lanes, a power of two that covers it, at most a warp; a thread has
// kFlight rows in flight. What neighbouring groups write lies side by side.

#include "elements.cuh"
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
  i64 vectors;  // whether all addresses allow the widest accesses
};

template <class T, class W, int kCount>
__device__ __forceinline__ void gather_tile(const Piece& piece, const i64* __restrict__ rows,
                                            W* __restrict__ out) {
  const int lanes = static_cast<int>(piece.lanes), lane = threadIdx.x & (lanes - 1),
            groups = kThreads / lanes;
  const int accesses = static_cast<int>(piece.dim / kCount);
  const i64 begin =
      piece.first + (blockIdx.x - piece.tile) * (groups * kFlight * kRounds) + threadIdx.x / lanes;
  const T* table = reinterpret_cast<const T*>(piece.table);
  for (int round = 0; round < kRounds; ++round) {
    const i64 first = begin + round * (groups * kFlight);
    if (first >= piece.end) return;
    const T* from[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const i64 at = first + f * groups;
      const i64 row = at < piece.end ? rows[at] : -1;
      from[f] = row >= 0 && row < piece.table_rows ? table + row * piece.dim : nullptr;
    }
    W* to = out + piece.out + (first - piece.first) * piece.dim;
    const i64 stride = groups * piece.dim;
    for (int access = lane; access < accesses; access += lanes) {
      Pack<T, kCount> values[kFlight];
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        values[f].words = {};
        if (from[f] != nullptr) values[f] = load<T, kCount>(from[f] + access * kCount);
      }
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        Pack<W, kCount> converted;
        convert(values[f], &converted);
        if (first + f * groups < piece.end)
          store<W, kCount>(to + f * stride + access * kCount, converted);
      }
    }
  }
}

template <class T, class W>
__device__ __forceinline__ void gather(const Piece* pieces, int count, const i64* rows, W* out) {
  constexpr int kWidest = 16 / (sizeof(T) > sizeof(W) ? sizeof(T) : sizeof(W));
  const Piece& piece = holding(pieces, count, blockIdx.x);
  if (piece.vectors != 0) {
    gather_tile<T, W, kWidest>(piece, rows, out);
  } else {
    gather_tile<T, W, 1>(piece, rows, out);
  }
}

#define GATHER(name, T, W)                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads)                              \
      name(const Piece* __restrict__ pieces, int count, const i64* __restrict__ rows, \
           W* __restrict__ out) {                                                     \
    gather<T, W>(pieces, count, rows, out);                                           \
  }

GATHER(gather_float32_float32, float, float)
GATHER(gather_float32_float16, float, Half)
GATHER(gather_float32_bfloat16, float, BFloat16)
GATHER(gather_float16_float32, Half, float)
GATHER(gather_float16_float16, Half, Half)
GATHER(gather_float16_bfloat16, Half, BFloat16)
GATHER(gather_bfloat16_float32, BFloat16, float)
GATHER(gather_bfloat16_float16, BFloat16, Half)
GATHER(gather_bfloat16_bfloat16, BFloat16, BFloat16)
