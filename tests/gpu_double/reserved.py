"""Stands in for a GPU's reserved memory (`collective.ops.gpu.reserved_memory`)."""

from __future__ import annotations

import ctypes
import mmap
import os

from collective.ops import memory

_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _allow(address: int, size: int, accesses: int) -> None:
    if _protect(address, size, accesses) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Reserved(memory.Region):
    """Reserves address space of which nothing can be touched but what has been taken."""

    def __init__(self, size: int):
        super().__init__(size)
        self.taken = 0
        _allow(self.address, self.size, 0)

    @property
    def address(self) -> int:
        return self._address

    def grow(self, size: int) -> None:
        """Takes memory, so that at least `size` bytes are there."""
        if size > self.taken:
            pages = -(-size // mmap.PAGESIZE)
            self.taken = min(pages * mmap.PAGESIZE, self.size)
            _allow(self.address, self.taken, mmap.PROT_READ | mmap.PROT_WRITE)
