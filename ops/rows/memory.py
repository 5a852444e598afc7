"""Reserves address space that takes memory as it is used, and that TensorFlow adopts in place.

TensorFlow adopts an array that a `numpy_function` returns if it is aligned to 64 bytes, else it
copies the array. But the memory stays NumPy's, and the first sparse update of a variable copies
memory that isn't TensorFlow's own. So a column of a dynamic table is in address space that
TensorFlow maps itself: `ImmutableConst`, a constant in a file. The file is as long as a column, and
empty. Once it is mapped, `Region.move_to` puts zero pages there, which take memory when they are
written. TensorFlow unmaps them when its variable goes. Growing never copies anything, and nobody
has to guess a capacity.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

_PAGE = mmap.PAGESIZE
# Constants of Linux that Python's mmap module lacks in part: readable, writable; private,
# anonymous, without reservation of swap space.
_PROTECTION, _RESERVED = 0x1 | 0x2, 0x2 | 0x20 | 0x4000
_MOVE = 0x1 | 0x2  # may move, to a given address
_DONTDUMP, _NOHUGEPAGE = 16, 15
# The number of a table's columns that must fit into what the process may reserve: its rows, the
# slots of two optimizers, and one that is being moved.
_COLUMNS = 8
COLUMN_GB = 96
_ADDRESSES_GB = 128 << 10

_libc = ctypes.CDLL(None, use_errno=True)
for _name, _arguments in (
    ("mmap", "pziiil"),
    ("mremap", "pzzip"),
    ("munmap", "pz"),
    ("madvise", "pzi"),
):
    getattr(_libc, _name).argtypes = [
        {"p": ctypes.c_void_p, "z": ctypes.c_size_t, "i": ctypes.c_int, "l": ctypes.c_long}[kind]
        for kind in _arguments
    ]
    getattr(_libc, _name).restype = (
        ctypes.c_int if _name in ("munmap", "madvise") else ctypes.c_void_p
    )
_FAILED = ctypes.c_void_p(-1).value


def aligned(shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """Returns an uninitialized array of `shape` that begins on 64 bytes."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + size].view(dtype).reshape(shape)


def rows_that_fit(row_bytes: int, most: int) -> int:
    """Returns how many rows of `row_bytes` to reserve for a column: all that memory could hold.

    They take at most COLUMN_GB, or the environment variable COLLECTIVE_COLUMN_GB: a process has
    128 TB of addresses for all columns. The number is smaller if the process may reserve less
    (`ulimit -v`, strict overcommit), and the same for every column of a table.
    """
    rows = rows_within(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), row_bytes, most)
    while rows > 1:
        try:
            Region(_COLUMNS * rows * row_bytes)
            return rows
        except MemoryError:
            rows //= 2
    return rows


def rows_within(size: int, row_bytes: int, most: int) -> int:
    """Returns how many rows of `row_bytes` a memory of `size` bytes could hold.

    The result is from 1 to `most`, within the limit of a column.
    """
    limit = int(column_gb() * (1 << 30))
    return min(most, max(1, min(limit, size) // row_bytes))


def column_gb() -> float:
    """Returns how many GB a column takes at most.

    Raises:
        ValueError: COLLECTIVE_COLUMN_GB is no number above 0.
    """
    text = os.environ.get("COLLECTIVE_COLUMN_GB") or str(COLUMN_GB)
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size <= _ADDRESSES_GB:
        raise ValueError(
            f"COLLECTIVE_COLUMN_GB={text}: give a number of GB above 0, {_ADDRESSES_GB} at most"
        )
    return size


def array_at(address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> np.ndarray:
    """Returns an array at an address, in memory that exists as long as `owner` does.

    An empty array may be anywhere.
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.asarray(_Bytes(address, size, owner)).view(dtype).reshape(shape)


class _Bytes:
    """Presents memory to NumPy as bytes.

    NumPy has no names for types that others have added (bfloat16).
    """

    def __init__(self, address: int, size: int, owner: Any):
        self._owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class Region:
    """Reserves `size` bytes of address space, all zeros; pages take memory when they are written.

    Attributes:
        size: in bytes, whole pages.

    Raises:
        MemoryError: there isn't enough address space.
    """

    def __init__(self, size: int):
        self.size = max(_PAGE, -(-size // _PAGE) * _PAGE)
        self._owned = False
        self._address: int = _libc.mmap(None, self.size, _PROTECTION, _RESERVED, -1, 0)
        if self._address == _FAILED:
            raise MemoryError(
                f"{self.size} bytes of address space can not be reserved "
                f"({os.strerror(ctypes.get_errno())}): see ulimit -v"
            )
        self._owned = True
        # With huge pages, small tables would take two megabytes per column, and core dumps would
        # contain terabytes of zeros.
        _libc.madvise(self._address, self.size, _NOHUGEPAGE)
        _libc.madvise(self._address, self.size, _DONTDUMP)

    @property
    def address(self) -> int:
        """Returns its start."""
        return self._address

    def __del__(self) -> None:
        if self._owned:
            _libc.munmap(self._address, self.size)

    def move_to(self, address: int) -> None:
        """Moves the pages to `address`, over what is mapped there; its owner unmaps them later."""
        if not self._owned:
            raise RuntimeError("this memory has been moved before")
        if _libc.mremap(self._address, self.size, self.size, _MOVE, address) == _FAILED:
            raise MemoryError(
                f"{self.size} bytes can not be moved: {os.strerror(ctypes.get_errno())}"
            )
        self._address, self._owned = address, False

    def view(self, *shape: int, dtype: Any) -> np.ndarray:
        """Returns the array in it, valid while the owner of the memory lives."""
        return array_at(self._address, shape, dtype, self)


class EmptyFile:
    """Makes an empty file of `size` bytes at `path`, to be mapped."""

    def __init__(self, size: int, path: str):
        self._path = path
        self._descriptor = os.memfd_create("collective")
        os.ftruncate(self._descriptor, size)
        self._inode = os.fstat(self._descriptor).st_ino
        if os.path.islink(path):  # A run failed before it was mapped.
            os.unlink(path)
        os.symlink(f"/proc/{os.getpid()}/fd/{self._descriptor}", path)

    def address(self) -> int:
        """Returns the address at which the file is mapped.

        Raises:
            RuntimeError: it is mapped nowhere, or in several places.
        """
        addresses = list(self._mappings())
        if len(addresses) != 1:
            raise RuntimeError(f"{self._path} is mapped {len(addresses)} times, not once")
        return addresses[0]

    def _mappings(self) -> Iterator[int]:
        with open("/proc/self/maps") as lines:
            for line in lines:
                if "memfd:collective" in line:
                    place, _, _, _, inode = line.split()[:5]
                    if int(inode) == self._inode:
                        yield int(place.partition("-")[0], 16)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close
