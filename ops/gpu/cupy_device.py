"""Runs kernels on a GPU by CuPy. Other files use only those parts of CuPy that NumPy has, too."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np

from collective.ops import newer_gpus
from collective.ops.gpu.device import Device, Kernel, Timed
from collective.ops.gpu.reserved_memory import Reserved
from collective.ops.gpu.sources import Source
from collective.ops.rows import memory

OPTIONS = ("-std=c++17",)
_STATIC_SHARED = 48 * 1024  # bytes; more must be asked for
_FILLER = 2**30  # bytes, many times an L2
_FILLINGS = tuple(4**n for n in range(1, 6))  # how often it is filled: about 1 to 300 ms

_use_locale = ctypes.CDLL(None).uselocale
_use_locale.argtypes, _use_locale.restype = [ctypes.c_void_p], ctypes.c_void_p


@contextlib.contextmanager
def kept_locale() -> Iterator[None]:
    """Keeps the thread's locale: NVIDIA's compiler (12.2) leaves it at "C", in which files are then
    read as ASCII.
    """
    before = _use_locale(None)
    try:
        yield
    finally:
        _use_locale(before)


class CupyDevice(Device):
    """Runs kernels on the current GPU, with CuPy's current stream, memory pool, and cache of
    compiled kernels on disk.

    Args:
        pooled: whether arrays come from CuPy's pool. If not, the pool is off in this process: each
            array is an allocation of CUDA's, so that a tool sees writes outside of it.

    Raises:
        RuntimeError: there is no CuPy, or no GPU that it can use; says which is missing, and what
        to do.
    """

    def __init__(self, pooled: bool = True) -> None:
        super().__init__()
        newer_gpus.before_cupy()
        try:
            import cupy
        except ImportError as error:
            raise RuntimeError(
                f"CuPy can not be imported ({error}): install the one for your CUDA, cupy-cuda12x "
                "or cupy-cuda13x"
            ) from error
        try:
            if cupy.cuda.runtime.getDeviceCount() == 0:
                raise RuntimeError("CuPy sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
            properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise RuntimeError(
                f"CuPy can use no GPU ({error}): look at nvidia-smi and CUDA_VISIBLE_DEVICES"
            ) from error
        try:
            # CuPy looks for its compiler, and for CUDA's headers, only at the first kernel.
            with kept_locale():
                cupy.RawModule(
                    code='extern "C" __global__ void nothing() {}', options=OPTIONS
                ).get_function("nothing")
                cupy.empty(1, np.float32).fill(1)  # its own kernels need more headers
        except Exception as error:
            raise RuntimeError(
                f"CuPy can compile no kernel ({error}): it needs NVRTC and the headers of CUDA. "
                "Install the CUDA toolkit and set CUDA_PATH, or install nvidia-cuda-nvrtc-cu12 "
                "and nvidia-cuda-runtime-cu12 of one release. If the GPU is newer than NVRTC, "
                "import CuPy after collective, or set CUPY_COMPILE_WITH_PTX=1"
            ) from error
        if not pooled:
            cupy.cuda.set_allocator(None)
        self.xp = cupy
        self._number = cupy.cuda.runtime.getDevice()
        self.name = properties["name"].decode()
        self.multiprocessors = int(properties["multiProcessorCount"])
        self._modules: dict[str, Any] = {}
        self._filler: Any = None

    def _load(self, source: Source, name: str) -> Kernel:
        if source.file not in self._modules:
            self._modules[source.file] = self.xp.RawModule(code=source.text(), options=OPTIONS)
        with kept_locale():
            return _CupyKernel(self._modules[source.file].get_function(name))

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        try:
            return self.xp.empty(shape, dtype)
        except self.xp.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(
                f"{self.name} has no room for {np.prod(shape) * np.dtype(dtype).itemsize:,} "
                f"bytes: "
                f"{error}"
            ) from error

    def upload(self, values: np.ndarray, into: Any) -> None:
        into.set(values, stream=self.xp.cuda.get_current_stream())

    def download(self, array: Any) -> np.ndarray:
        return np.asarray(self.xp.asnumpy(array))

    def pointer(self, array: Any) -> int:
        return int(array.data.ptr)

    def reserve(self, size: int) -> Reserved:
        device = self.xp.cuda.Device(self._number)

        def enter() -> None:
            device.use()
            self.xp.cuda.runtime.free(0)

        return Reserved(size, self._number, enter, device.synchronize)

    def trim(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()

    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size == 0:
            return self.xp.empty(shape, dtype)
        memory = self.xp.cuda.UnownedMemory(address, size, owner, self._number)
        return self.xp.ndarray(shape, dtype, self.xp.cuda.MemoryPointer(memory, 0))

    def rows_that_fit(self, row_bytes: int, most: int) -> int:
        return memory.rows_within(int(self.xp.cuda.runtime.memGetInfo()[1]), row_bytes, most)

    def on_stream(self, number: int) -> contextlib.AbstractContextManager[Any]:
        stream: contextlib.AbstractContextManager[Any] = self.xp.cuda.ExternalStream(
            number, self._number
        )
        return stream

    def stream(self) -> int:
        if self.xp.cuda.runtime.getDevice() != self._number:
            raise RuntimeError(
                f"GPU {self.xp.cuda.runtime.getDevice()} is current in this thread, but kernels "
                f"run on GPU {self._number}: make it current "
                f"(cupy.cuda.Device({self._number}).use())"
            )
        return int(self.xp.cuda.get_current_stream().ptr)

    def timed(self, work: Callable[[], object], waits: bool = False) -> Timed:
        if self._filler is None:
            self._filler = self.empty(_FILLER, np.uint8)
        for filling in _FILLINGS:
            begin, end = self.xp.cuda.Event(), self.xp.cuda.Event()
            # Meanwhile the host launches all of `work`.
            for _ in range(filling):
                self._filler.fill(0)
            begin.record()
            work()
            late = bool(begin.done)
            end.record()
            end.synchronize()
            if waits or not late:
                break
        return Timed(float(self.xp.cuda.get_elapsed_time(begin, end)), late and not waits)

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def versions(self) -> dict[str, str]:
        runtime = self.xp.cuda.runtime
        nvrtc = ".".join(map(str, self.xp.cuda.nvrtc.getVersion()))
        return {
            "gpu": self.name,
            "cupy": self.xp.__version__,
            "numpy": np.__version__,
            "nvrtc": nvrtc,
            "cuda": _version(runtime.runtimeGetVersion()),
            "driver": _version(runtime.driverGetVersion()),
        }

    def memory(self) -> str:
        """Says how much memory the arrays take, for a report."""
        pool = self.xp.get_default_memory_pool()
        free, total = self.xp.cuda.runtime.memGetInfo()
        return (
            f"hash tables and kernels use {pool.used_bytes():,} bytes and hold "
            f"{pool.total_bytes():,}; {free:,} of the GPU's {total:,} are free"
        )


class _CupyKernel:
    def __init__(self, function: Any):
        self._function = function

    @property
    def handle(self) -> int:
        return int(self._function.kernel.ptr)

    def __call__(
        self, blocks: int, threads: int, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        if blocks == 0:
            return
        if shared > _STATIC_SHARED and self._function.max_dynamic_shared_size_bytes < shared:
            self._function.max_dynamic_shared_size_bytes = shared
        self._function((blocks,), (threads,), tuple(arguments), shared_mem=shared)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
