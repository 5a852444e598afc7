"""Reserves address space of a GPU and fills it with memory as needed: a column of a dynamic table
grows without ever moving.

CuPy has no functions for CUDA's virtual memory, so this module calls the driver. Whenever more
memory is needed, a piece of physical memory is mapped after the last one, at least an eighth of
what is there already. The driver takes it from memory that no allocator has.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any, Callable

_OUT_OF_MEMORY = 2
# CUmemAllocationType, CUmemLocationType, CUmemAccess_flags
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("of_windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@functools.cache
def driver() -> Any:
    """Loads CUDA's driver.

    Raises:
        OSError: there is no driver.
    """
    library = ctypes.CDLL("libcuda.so.1")
    address, size, flags = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64
    for name, arguments in {
        "cuMemGetAllocationGranularity": [
            ctypes.POINTER(size),
            ctypes.POINTER(_Properties),
            ctypes.c_int,
        ],
        "cuMemAddressReserve": [ctypes.POINTER(address), size, size, address, flags],
        "cuMemAddressFree": [address, size],
        "cuMemCreate": [ctypes.POINTER(ctypes.c_uint64), size, ctypes.POINTER(_Properties), flags],
        "cuMemRelease": [ctypes.c_uint64],
        "cuMemMap": [address, size, size, ctypes.c_uint64, flags],
        "cuMemUnmap": [address, size],
        "cuMemSetAccess": [address, size, ctypes.POINTER(_Access), size],
        "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


class Reserved:
    """Holds address space on one GPU. Memory is taken from its start, and is not
    initialised.

    Args:
        size: the most bytes that it can take.
        device: the number of the GPU.
        enter: called before each use of the driver: makes the GPU's context the thread's
            context.
        wait: called before memory is returned: waits until the GPU has finished all its
            work.
        cuda: the driver.

    Attributes:
        address: its start.
        size: the most bytes that it can take, in whole pieces.
        taken: how many bytes it has taken.

    Raises:
        MemoryError: there isn't enough address space.
    """

    def __init__(
        self,
        size: int,
        device: int,
        enter: Callable[[], object],
        wait: Callable[[], object],
        cuda: Any = None,
    ):
        self.address = self.taken = 0
        self._enter, self._wait, self._cuda = enter, wait, cuda or driver()
        enter()
        self._properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, device))
        self._pieces: list[int] = []  # the sizes of the mapped pieces
        piece, address = ctypes.c_size_t(), ctypes.c_uint64()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(piece), ctypes.byref(self._properties), 0
        )
        self._piece = int(piece.value)
        self.size = self._whole(size)
        self._call("cuMemAddressReserve", ctypes.byref(address), self.size, 0, 0, 0)
        self.address = int(address.value)

    def grow(self, size: int) -> None:
        """Takes memory if necessary, so that there are at least `size` bytes. The rest stays
        as it is.

        Raises:
            MemoryError: the GPU has no room for them; nothing has changed.
            ValueError: that is more than was reserved.
        """
        if size <= self.taken:
            return
        if size > self.size:
            raise ValueError(f"{size:,} bytes are wanted of {self.size:,} that were reserved")
        self._enter()
        generous = min(self._whole(max(size, self.taken + self.taken // 8)), self.size) - self.taken
        try:
            self._map(generous)
        except MemoryError:
            least = self._whole(size) - self.taken
            if least == generous:
                raise
            self._map(least)

    def shrink(self, size: int) -> None:
        """Returns the pieces after the first `size` bytes. Work launched from now on may not
        use them.
        """
        if not self._pieces or self.taken - self._pieces[-1] < size:
            return
        self._enter()
        self._wait()
        while self._pieces and self.taken - self._pieces[-1] >= size:
            last = self._pieces[-1]
            self._call("cuMemUnmap", self.address + self.taken - last, last)
            self._pieces.pop()
            self.taken -= last

    def _whole(self, size: int) -> int:
        return max(1, -(-size // self._piece)) * self._piece

    def _map(self, size: int) -> None:
        handle, at = ctypes.c_uint64(), self.address + self.taken
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        try:
            self._call("cuMemMap", at, size, 0, handle, 0)
        finally:  # the memory stays as long as it is mapped
            self._cuda.cuMemRelease(handle)
        try:
            self._call(
                "cuMemSetAccess",
                at,
                size,
                ctypes.byref(_Access(self._properties.location, _READ_WRITE)),
                1,
            )
        except Exception:
            self._cuda.cuMemUnmap(at, size)
            raise
        self._pieces.append(size)
        self.taken += size

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(status, ctypes.byref(text))
        message = f"{name}: {(text.value or b'an unknown error').decode()} ({status})"
        if status == _OUT_OF_MEMORY:
            raise MemoryError(message)
        raise RuntimeError(message)

    def free(self) -> None:
        """Returns all of it. Work that is launched from now on may not use it."""
        address, self.address = self.address, 0
        if not address:
            return
        self._enter()
        self._wait()
        at = address
        for size in self._pieces:
            self._cuda.cuMemUnmap(at, size)
            at += size
        self._cuda.cuMemAddressFree(address, self.size)
        self._pieces, self.taken = [], 0

    def __del__(self) -> None:
        # When Python ends, CUDA may already be gone, and the memory with it.
        with contextlib.suppress(Exception):
            self.free()
