"""Stands in for a GPU's reserved memory (`collective.ops.gpu.reserved_memory`)."""

from __future__ import annotations

import ctypes
import mmap
import os

from collective.ops.rows import memory

_UNFILLED = 0xCD
_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def allow(address: int, size: int, accesses: int) -> None:
    """Lets whole pages be accessed in some ways, or in none."""
    if _protect(address, size, accesses) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Reserved(memory.Region):
    """Reserves address space of which nothing can be touched but what has been taken."""

    def __init__(self, size: int):
        super().__init__(size)
        self.taken = 0
        allow(self.address, self.size, 0)

    @property
    def address(self) -> int:
        return self._address

    def grow(self, size: int) -> None:
        """Takes memory, so that at least `size` bytes are there."""
        if size > self.taken:
            taken = self._whole(size)
            begin, size = self.address + self.taken, taken - self.taken
            allow(begin, size, mmap.PROT_READ | mmap.PROT_WRITE)
            ctypes.memset(begin, _UNFILLED, size)  # A GPU's memory isn't filled, either.
            self.taken = taken

    def shrink(self, size: int) -> None:
        """Gives pages back that lie after the first `size` bytes."""
        left = self._whole(size)
        if left < self.taken:
            allow(self.address + left, self.taken - left, 0)
            self.taken = left

    def _whole(self, size: int) -> int:
        return min(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, self.size)
