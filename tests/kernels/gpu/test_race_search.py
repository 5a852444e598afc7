"""The search for races knows what orders accesses, and what doesn't."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.gpu.emulator import EmulatedDevice
from tests.kernels.gpu.emulator.build import library
from tests.kernels.gpu.emulator.device import EmulatedKernel, RaceError

# What two blocks of 64 threads do, and what is found; nothing is, where it is empty.
BODIES = {
    "a_barrier": ("tile[t] = t; __syncthreads(); seen[at] = tile[63 - t];", ""),
    "nothing": ("tile[t] = t; seen[at] = tile[63 - t];", "by two threads in shared memory"),
    "a_warp": ("tile[t] = t; __syncwarp(); seen[at] = tile[t ^ 1];", ""),
    "another_warp": ("tile[t] = t; __syncwarp(); seen[at] = tile[t ^ 32];", "by two threads"),
    "a_shuffle": ("tile[t] = t; __shfl_sync(~0u, t, 0); seen[at] = tile[t ^ 1];", ""),
    "half_a_warp": (
        "tile[t] = t; __syncwarp(0xFFFFu << (t & 16)); seen[at] = tile[t ^ 1];",
        "",
    ),
    "the_other_half": (
        "tile[t] = t; __syncwarp(0xFFFFu << (t & 16)); seen[at] = tile[t ^ 16];",
        "by two threads in shared memory",
    ),
    "exchanges_of_the_other_half": (
        "tile[t] = t; if (t % 32 < 16) { __syncwarp(0xFFFFu); __syncwarp(0xFFFFu); } "
        "seen[at] = tile[t ^ 16];",
        "by two threads in shared memory",
    ),
    "blocks_have_their_own": (
        "if (t == 0) tile[0] = at; __syncthreads(); seen[at] = tile[0];",
        "",
    ),
    "one_value": ("out[0] = 7;", ""),
    "two_values": ("out[0] = blockIdx.x;", "write after write by two blocks in global memory"),
    "one_value_is_read": ("if (t == 0) out[0] = 7; seen[at] = out[0];", "by two threads"),
    "atomic": ("atomicAdd(out, 1);", ""),
    "atomic_and_plain": ("atomicAdd(out, 1); seen[at] = *out;", "plain at .*, atomic at"),
    "plain_before_atomic": (
        "if (at == 0) seen[0] = out[0]; if (t == 0) atomicAdd(out, 1);",
        "by two blocks in global memory: (plain at .*, atomic|atomic at .*, plain)",
    ),
    "atomic_and_l2": ("atomicAdd(out, 1); seen[at] = __ldcg(out);", ""),
    "l2": ("__stcg(out, t); seen[at] = *static_cast<volatile int*>(out);", ""),
    "l2_and_plain": (
        "if (t == 0) *static_cast<volatile int*>(out) = at; seen[at] = *out;",
        "L2 at .*, plain at|plain at .*, L2 at",
    ),
    "l2_of_what_was_plain": (
        "if (at == 0) out[0] = 1; __syncthreads(); atomicAdd(out, 1);",
        "plain at .*, atomic at",
    ),
    "volatile_in_shared_memory": (
        "volatile int* slot = tile; slot[t] = t; seen[at] = slot[t ^ 1];",
        "by two threads in shared memory",
    ),
    "bytes": ("reinterpret_cast<char*>(out)[at] = t;", ""),
    "a_byte": (
        "reinterpret_cast<char*>(out)[t / 2] = t;",
        "write after write by two threads in global memory",
    ),
    "read_only": ("seen[at] = __ldg(out + at); out[at] = 1;", "read as read-only, written"),
    "written_read_only": ("out[at] = 1; seen[at] = __ldg(out + at);", "written, read as read-only"),
    "fences": (
        "out[1 + at] = t; __threadfence(); __syncthreads(); "
        "if (t == 0) tile[0] = atomicAdd(out, 1); __syncthreads(); __threadfence(); "
        "if (tile[0] == 1) seen[at] = out[1 + (at ^ 64)];",
        "",
    ),
    "fences_of_one_thread": (
        "out[1 + at] = t; __syncthreads(); if (t == 0) { __threadfence(); "
        "tile[0] = atomicAdd(out, 1); __threadfence(); } __syncthreads(); "
        "if (tile[0] == 1) seen[at] = out[1 + (at ^ 64)];",
        "",
    ),
    "a_fence_too_early": (
        "__threadfence(); out[1 + at] = t; __syncthreads(); "
        "if (t == 0) tile[0] = atomicAdd(out, 1); __syncthreads(); __threadfence(); "
        "if (tile[0] == 1) seen[at] = out[1 + (at ^ 64)];",
        "read after write by two blocks in global memory",
    ),
    "no_second_fence": (
        "out[1 + at] = t; __threadfence(); __syncthreads(); "
        "if (t == 0) tile[0] = atomicAdd(out, 1); __syncthreads(); "
        "if (tile[0] == 1) seen[at] = out[1 + (at ^ 64)];",
        "read after write by two blocks in global memory",
    ),
    "fences_without_a_barrier": (
        "out[1 + at] = t; __threadfence(); "
        "if (t == 0) tile[0] = atomicAdd(out, 1); __syncthreads(); __threadfence(); "
        "if (tile[0] == 1) seen[at] = out[1 + (at ^ 64)];",
        "read after write by two blocks in global memory",
    ),
    "fences_by_two_words": (
        "out[2 + at] = t; __threadfence(); __syncthreads(); "
        "if (t == 0) atomicAdd(out + blockIdx.x, 1); __syncthreads(); __threadfence(); "
        "seen[at] = out[2 + (at ^ 64)];",
        "by two blocks in global memory",
    ),
}
KERNELS = "\n".join(
    f'extern "C" __global__ void {name}(int* out, int* seen) {{ '
    "__shared__ int tile[64]; const int t = threadIdx.x, at = 64 * blockIdx.x + t; "
    f"static_cast<void>(tile + at); {body} }}"
    for name, (body, _) in BODIES.items()
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", BODIES)
def test_what_orders_accesses(name: str, seed: int):
    device, found = EmulatedDevice(seed, searches_races=True), BODIES[name][1]
    kernel = EmulatedKernel(device, library(KERNELS, tuple(BODIES), searches_races=True), name)
    arrays = device.zeros(130, np.int32), device.zeros(130, np.int32)
    if found:
        with pytest.raises(RaceError, match=f"{name} has races:\n(.*\n)*.*{found}"):
            kernel(2, 64, arrays)
    else:
        kernel(2, 64, arrays)
