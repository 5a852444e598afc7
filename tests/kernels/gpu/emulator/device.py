"""Stands in for a GPU: NumPy arrays, and kernels that g++ compiled."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np

from collective.ops.gpu.device import Device, Kernel, Timed
from collective.ops.gpu.sources import Source
from collective.ops.rows import memory
from tests.gpu_double import hidden
from tests.gpu_double.driver import installed
from tests.gpu_double.reserved import Reserved
from tests.kernels.gpu.emulator import races
from tests.kernels.gpu.emulator.build import library_of

GUARD = 256  # bytes on both sides of an array
_GUARDED = 0x5A
_UNFILLED = 0xCD
_LOCK = threading.Lock()


class KernelError(RuntimeError):
    """Says that a kernel can not go on, or wrote where it must not."""


class RaceError(KernelError):
    """Says that other orders of threads or blocks may give something else."""


class _Launch(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
    ]


class EmulatedDevice(Device):
    """Runs kernels on the CPU.

    What `empty` returns is filled with a pattern, and guarded: a kernel that writes outside it is
    an error.

    Args:
        seed: in which order blocks and threads take turns; 0 for ascending order.
        seconds: how long a launch may take.
        searches_races: a launch with a race is an error; None if the environment says so.

    Attributes:
        current_stream: what `stream` returns.
    """

    def __init__(self, seed: int = 0, seconds: float = 60.0, searches_races: bool | None = None):
        super().__init__()
        self.xp, self.name, self.multiprocessors = np, "emulator", 2
        self.seed, self.seconds, self.launches = seed, seconds, 0
        self.searches_races = races.wanted() if searches_races is None else searches_races
        self.allocations = 0
        self.current_stream = 0
        self._guarded: list[Any] = []

    def _load(self, source: Source, name: str) -> Kernel:
        return EmulatedKernel(self, library_of(source, self.searches_races), name)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        self.allocations += 1
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.full(size + 3 * GUARD, _GUARDED, np.uint8)
        first = GUARD + -memory.ctypes.data % GUARD
        memory[first : first + size] = _UNFILLED
        self._guarded.append((weakref.ref(memory), first, first + size))
        return memory[first : first + size].view(dtype).reshape(shape)

    def check_guards(self, kernel: str) -> None:
        """Raises KernelError if something was written outside an array."""
        alive = []
        for reference, first, end in self._guarded:
            memory = reference()
            if memory is None:
                continue
            alive.append((reference, first, end))
            if np.any(memory[:first] != _GUARDED) or np.any(memory[end:] != _GUARDED):
                raise KernelError(f"{kernel} wrote outside an array of {end - first} bytes")
        self._guarded = alive

    def upload(self, values: np.ndarray, into: Any) -> None:
        assert into.shape == values.shape and into.dtype == values.dtype
        into[...] = values

    def download(self, array: Any) -> np.ndarray:
        return np.array(array)

    def pointer(self, array: Any) -> int:
        return int(array.ctypes.data)

    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> np.ndarray:
        return memory.array_at(address, shape, dtype, owner)

    def reserve(self, size: int) -> Reserved:
        return Reserved(size)

    def trim(self) -> None:
        pass

    def rows_that_fit(self, row_bytes: int, most: int) -> int:
        return memory.rows_that_fit(row_bytes, most)

    @contextlib.contextmanager
    def on_stream(self, number: int) -> Iterator[None]:
        before, self.current_stream = self.current_stream, number
        try:
            yield
        finally:
            self.current_stream = before

    def stream(self) -> int:
        return self.current_stream

    def timed(self, work: Callable[[], object], waits: bool = False) -> Timed:
        begin = time.perf_counter()
        work()
        return Timed(1e3 * (time.perf_counter() - begin), False)

    def synchronize(self) -> None:
        pass

    def memory(self) -> str:
        return f"{self.allocations} arrays were made"

    def versions(self) -> dict[str, str]:
        return {"gpu": self.name, "numpy": np.__version__}


class EmulatedKernel:
    """Launches one kernel of a library that `build.library` made."""

    def __init__(self, device: EmulatedDevice, library: Path, name: str):
        loaded = self._loaded = ctypes.CDLL(str(library))
        self._library = library
        self._device, self._name, self._launch = device, name, getattr(loaded, f"launch_{name}")
        self._launch.restype = ctypes.c_char_p
        sizes = getattr(loaded, f"sizes_{name}")
        sizes.restype = ctypes.POINTER(ctypes.c_int)
        self.sizes: list[int] = []
        while sizes()[len(self.sizes)]:
            self.sizes.append(sizes()[len(self.sizes)])
        self._handle = 0

    def __call__(
        self, blocks: int, threads: int, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        if blocks == 0:
            return
        held = [self._held(number, argument) for number, argument in enumerate(arguments)]
        with hidden.on_device():
            self._start(blocks, threads, shared, [value.ctypes.data for value in held])

    @property
    def handle(self) -> int:
        """Returns what the stand-in for CUDA's driver launches it by."""
        if self._handle == 0:
            self._handle = installed().register(self._name, self)
        return self._handle

    def run(self, blocks: int, threads: int, shared: int, arguments: Sequence[bytes]) -> None:
        """Launches it with arguments of exactly the parameters' sizes."""
        held = [np.frombuffer(argument, np.uint8) for argument in arguments]
        self._start(blocks, threads, shared, [value.ctypes.data for value in held])

    def _start(self, blocks: int, threads: int, shared: int, arguments: Sequence[int]) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*arguments)
        device = self._device
        device.launches += 1
        launch = _Launch(
            blocks, threads, shared, device.seed and device.seed + device.launches, device.seconds
        )
        with _LOCK:
            failure = self._launch(ctypes.byref(launch), addresses, len(arguments))
            found = races.found(self._loaded, self._library) if device.searches_races else []
        if failure is not None:
            raise KernelError(f"{self._name}: {failure.decode()}")
        if found:
            raise RaceError("\n".join([f"{self._name} has races:", *found]))
        device.check_guards(self._name)

    def _held(self, number: int, argument: Any) -> np.ndarray:
        """Returns a 0-dimensional array of the argument, of exactly the size that the kernel reads:
        CuPy doesn't convert, either.
        """
        if isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous, f"{self._name}: argument {number} is not contiguous"
            value = np.array(argument.ctypes.data, np.uint64)
        else:
            assert isinstance(argument, np.generic), (
                f"{self._name}: argument {number} is {type(argument)}, no NumPy scalar"
            )
            value = np.array(argument)
        wanted = self.sizes[number] if number < len(self.sizes) else value.itemsize
        if value.itemsize != wanted:
            raise KernelError(
                f"{self._name}: argument {number} has {value.itemsize} bytes, its "
                f"parameter {wanted}"
            )
        return value
