// Integers of fixed width: the compiler at run time has no headers. And what warps find by them.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

constexpr u32 kAllLanes = 0xFFFFFFFFu;

// The last lane of a warp whose `begin` is `id` or less, if those of all lanes ascend.
__device__ __forceinline__ int lane_holding(u32 begin, u32 id) {
  int lane = 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (__shfl_sync(kAllLanes, begin, lane + step) <= id) lane += step;
  }
  return lane;
}
