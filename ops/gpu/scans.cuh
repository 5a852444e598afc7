// Sums over a block of threads.

#include "integers.cuh"

// The sum of `value` over the threads before this one; `*total` becomes that over all. All threads
// of a block of whole warps call it. `sums` is shared memory for 33; a barrier separates two calls.
__device__ __forceinline__ u32 exclusive_sum(u32 value, u32* sums, u32* total) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  u32 sum = value;
#pragma unroll
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    const u32 mine = lane < warps ? sums[lane] : 0;
    u32 running = mine;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      const u32 other = __shfl_up_sync(kAllLanes, running, distance);
      if (lane >= distance) running += other;
    }
    sums[lane] = running - mine;
    if (lane == 31) sums[32] = running;
  }
  __syncthreads();
  *total = sums[32];
  return sums[warp] + sum - value;
}
