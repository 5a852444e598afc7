"""The double of CUDA does what CUDA does, and says so where a kernel goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.gpu.emulator import EmulatedDevice, KernelError
from tests.kernels.gpu.emulator.build import library
from tests.kernels.gpu.emulator.device import EmulatedKernel

KERNELS = r"""
extern "C" __global__ void __launch_bounds__(256) reversed(const int* __restrict__ in, int* out) {
  __shared__ int tile[64];
  tile[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void warp_sums(const float* in, float* out, int n) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += 32) sum += in[i];
  for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, d);
  if (threadIdx.x == 0) *out = sum;
}
extern "C" __global__ void dynamic_shared(int* out) {
  extern __shared__ __align__(16) int words[];
  words[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = words[(threadIdx.x + 1) % blockDim.x];
}
extern "C" __global__ void lanes(unsigned* out) {
  unsigned* mine = out + 8 * threadIdx.x;
  const unsigned all = 0xFFFFFFFFu, t = threadIdx.x;
  mine[0] = __ballot_sync(all, t % 3 == 0);
  mine[1] = __match_any_sync(all, t / 5);
  mine[2] = __shfl_sync(all, t, 7);
  mine[3] = __shfl_xor_sync(all, t, 5);
  mine[4] = __shfl_up_sync(all, t, 3);
  mine[5] = __shfl_down_sync(all, t, 2, 8);
  mine[6] = __any_sync(all, t == 9) * 2 + __all_sync(all, t < 31);
  if (t % 2 == 0) mine[7] = __match_any_sync(0x55555555u, t & 4);
  else mine[7] = __shfl_sync(0xAAAAAAAAu, t, 1);
}
extern "C" __global__ void counted(int* count, float* sum, unsigned long long* most) {
  atomicAdd(count, 1);
  atomicAdd(sum, .5f);
  atomicMax(most, (unsigned long long)(threadIdx.x) << 40);
}
extern "C" __global__ void unsafe_count(int* count) {
  const int seen = *count;
  __nanosleep(1);
  *count = seen + 1;
}
extern "C" __global__ void half_barrier() {
  if (threadIdx.x < 32) __syncthreads(); else __syncthreads_count(1);
}
extern "C" __global__ void wrong_mask() {
  __shfl_sync(threadIdx.x < 16 ? 0xFFFFFFFFu : 0xFFFF0000u, 1, 16);
}
extern "C" __global__ void lonely_lane() { if (threadIdx.x == 3) __syncwarp(); }
extern "C" __global__ void absent_lane() {
  __shfl_sync(0x0000FFFFu << (threadIdx.x / 16 * 16), 1, 31);
}
extern "C" __global__ void endless(int* flag) { while (atomicAdd(flag, 0) == 0) {} }
extern "C" __global__ void outside(int* out) { out[threadIdx.x] = 1; }
extern "C" __global__ void unset(int* out) { __shared__ int word; out[0] = word; }
extern "C" __global__ void vectors(const float* in, float* out) {
  reinterpret_cast<float4*>(out)[threadIdx.x] =
      *reinterpret_cast<const float4*>(in + 4 * threadIdx.x);
}
template <class T>
__device__ int reversed_in_shared_memory() {
  __shared__ T words[64];
  words[threadIdx.x] = threadIdx.x;
  __syncthreads();
  return words[63 - threadIdx.x];
}
extern "C" __global__ void of_templates(int* out) {
  out[threadIdx.x] = reversed_in_shared_memory<int>() + 100 * reversed_in_shared_memory<float>();
}
"""
NAMES = (
    "reversed",
    "warp_sums",
    "dynamic_shared",
    "lanes",
    "counted",
    "unsafe_count",
    "half_barrier",
    "wrong_mask",
    "lonely_lane",
    "absent_lane",
    "endless",
    "outside",
    "unset",
    "vectors",
    "of_templates",
)
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])


def launch(
    name: str,
    blocks: int,
    threads: int,
    *arguments: Any,
    seed: int = 0,
    shared: int = 0,
    seconds: float = 20.0,
    device: EmulatedDevice | None = None,
) -> None:
    device = device or EmulatedDevice(seed, seconds)
    EmulatedKernel(device, library(KERNELS, NAMES), name)(blocks, threads, arguments, shared)


@SEEDS
def test_a_barrier_and_shared_memory(seed: int):
    values, out = np.arange(640, dtype=np.int32), np.zeros(640, np.int32)
    launch("reversed", 10, 64, values, out, seed=seed)
    np.testing.assert_array_equal(out, values.reshape(10, 64)[:, ::-1].ravel())


@SEEDS
def test_dynamic_shared_memory(seed: int):
    out = np.zeros(128, np.int32)
    launch("dynamic_shared", 1, 128, out, seed=seed, shared=512)
    np.testing.assert_array_equal(out, np.roll(np.arange(128), -1))


@SEEDS
def test_shared_memory_of_templates(seed: int):
    out = np.zeros(64, np.int32)
    launch("of_templates", 1, 64, out, seed=seed)
    np.testing.assert_array_equal(out, 101 * (63 - np.arange(64)))


@SEEDS
def test_a_warp_sums(seed: int):
    values, out = np.arange(1000, dtype=np.float32), np.zeros(1, np.float32)
    launch("warp_sums", 1, 32, values, out, np.int32(1000), seed=seed)
    assert out[0] == values.sum()


@SEEDS
def test_the_exchanges_of_a_warp(seed: int):
    out, t = np.zeros((32, 8), np.uint32), np.arange(32)
    launch("lanes", 1, 32, out, seed=seed)
    assert set(out[:, 0]) == {sum(1 << lane for lane in range(0, 32, 3))}
    np.testing.assert_array_equal(
        out[:, 1], [sum(1 << other for other in range(32) if other // 5 == lane // 5) for lane in t]
    )
    np.testing.assert_array_equal(out[:, 2], 7)
    np.testing.assert_array_equal(out[:, 3], t ^ 5)
    np.testing.assert_array_equal(out[:, 4], np.where(t < 3, t, t - 3))
    np.testing.assert_array_equal(out[:, 5], np.where(t % 8 < 6, t + 2, t))
    np.testing.assert_array_equal(out[:, 6], 2)
    even = np.array([sum(1 << o for o in range(0, 32, 2) if o & 4 == lane & 4) for lane in t])
    np.testing.assert_array_equal(out[:, 7], np.where(t % 2 == 0, even, 1))


@SEEDS
def test_atomic_operations(seed: int):
    count, total, most = np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.uint64)
    launch("counted", 5, 100, count, total, most, seed=seed)
    assert (count[0], total[0], most[0]) == (500, 250, 99 << 40)


def test_a_race_shows():
    count = np.zeros(1, np.int32)
    launch("unsafe_count", 1, 256, count, seed=1)
    assert count[0] < 256


@pytest.mark.parametrize(
    "name, threads, message",
    [
        ("half_barrier", 64, "deadlock: thread 0 at __syncthreads"),
        ("wrong_mask", 32, "deadlock|lacks itself|is not there"),
        ("lonely_lane", 32, "deadlock|is not there"),
        ("absent_lane", 32, "lane 31, which mask 0000ffff lacks"),
    ],
)
@SEEDS
def test_what_can_not_go_on_is_an_error(name: str, threads: int, message: str, seed: int):
    with pytest.raises(KernelError, match=message):
        launch(name, 1, threads, seed=seed)


def test_what_does_not_end_is_an_error():
    with pytest.raises(KernelError, match="out of time"):
        launch("endless", 1, 2, np.zeros(1, np.int32), seconds=0.1)


def test_writing_outside_an_array_is_an_error():
    device = EmulatedDevice()
    out = device.empty(100, np.int32)
    launch("outside", 1, 100, out, device=device)
    with pytest.raises(KernelError, match="outside an array of 400 bytes"):
        launch("outside", 1, 101, out, device=device)


@pytest.mark.parametrize("read, written", [(1, 0), (0, 2)])
def test_an_access_that_is_not_aligned_is_an_error(read: int, written: int):
    device = EmulatedDevice()
    given, out = device.zeros(20, np.float32), device.empty(20, np.float32)
    launch("vectors", 1, 4, given, out, device=device)
    with pytest.raises(
        KernelError, match="thread 0 reads or writes at an address that is not aligned"
    ):
        launch("vectors", 1, 4, given[read:], out[written:], device=device)


def test_shared_memory_holds_nothing_of_the_block_before():
    out = np.zeros(1, np.int32)
    launch("unset", 1, 1, out)
    assert out.view(np.uint32)[0] == 0xA5A5A5A5


def test_an_argument_of_another_size_is_an_error():
    with pytest.raises(KernelError, match="argument 2 has 8 bytes, its parameter 4"):
        launch("warp_sums", 1, 32, np.zeros(1, np.float32), np.zeros(1, np.float32), np.int64(1))
