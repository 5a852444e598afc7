"""Measures what a GPU's driver makes the host wait for: copies to the GPU after work that runs.

    python tools/gpu/probe.py

An operation copies its plan to the GPU before it launches kernels. From memory that is not pinned
such a copy may wait for the stream; for each size, the milliseconds of the call after a kernel of
some milliseconds, from both kinds of memory, and of what else an operation calls.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import cupy
import numpy as np

SIZES = (256, 1024, 4096, 16384, 65536, 65537, 262144, 1048576)  # bytes
REPEATS = 9


def driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyHtoDAsync_v2.argtypes = [
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    return library


def behind_work(stream: cupy.cuda.Stream, call: Callable[[], object]) -> float:
    """Returns the median milliseconds that `call` takes on the host while the GPU is busy."""
    filler, taken = cupy.empty(2**30, np.uint8), []
    for _ in range(REPEATS):
        with stream:
            for _ in range(4):
                filler.fill(0)
            begin = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - begin))
        stream.synchronize()
    return float(np.median(taken))


def main() -> None:
    cuda, stream = driver(), cupy.cuda.Stream(non_blocking=True)
    there = cupy.empty(2**21, np.uint8)

    def copy(source: int, size: int) -> Callable[[], object]:
        return lambda: cuda.cuMemcpyHtoDAsync_v2(there.data.ptr, source, size, stream.ptr)

    print(f"filling takes {behind_work(stream, stream.synchronize):.3f} ms, an empty call ", end="")
    print(f"{behind_work(stream, lambda: None):.4f}")
    print(f"{'bytes':>9} {'pageable':>9} {'pinned':>9} ms")
    for size in SIZES:
        pageable = np.ones(size, np.uint8)
        pinned = cupy.cuda.alloc_pinned_memory(size)
        ms = [behind_work(stream, copy(at, size)) for at in (pageable.ctypes.data, pinned.ptr)]
        print(f"{size:9d} {ms[0]:9.4f} {ms[1]:9.4f}")
    event = cupy.cuda.Event(disable_timing=True)
    print(f"an event is recorded in {behind_work(stream, lambda: event.record(stream)):.4f} ms")


if __name__ == "__main__":
    main()
