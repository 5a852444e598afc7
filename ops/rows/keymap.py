"""Maps the int64 keys of a dynamic table to local rows: the compiled map of keymap.cc.

It works on NumPy arrays. It is loaded by ctypes, so that other threads can run at the same time,
and needs neither TensorFlow nor Python's headers.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np

from collective.ops.counting import counted

MOST_ROWS = 2**32 - 2
_FULL, _OUT_OF_MEMORY = -1, -2


@functools.cache
def _library() -> Any:
    """Loads the compiled map.

    Raises:
        ImportError: it wasn't built.
    """
    path = Path(__file__).resolve().parents[1] / "_keymap.so"
    if not path.exists():
        raise ImportError(
            f"dynamic tables need the compiled key map, and {path} does not exist. `make setup` in "
            "a checkout builds it (or python setup.py build_ext --inplace); an installed package "
            "has it."
        )
    library = ctypes.CDLL(str(path))
    pointer, count, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    for name, result, arguments in (
        ("new", pointer, [size]),
        ("free", None, [pointer]),
        ("count", size, [pointer]),
        ("bytes", size, [pointer]),
        ("keys", pointer, [pointer]),
        ("find", None, [pointer, pointer, count, pointer]),
        ("find_or_insert", count, [pointer, pointer, count, pointer]),
        ("remove", count, [pointer, pointer, count, pointer, pointer]),
    ):
        function = getattr(library, f"keymap_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def check() -> None:
    """Raises ImportError, with the way to build it, if the compiled map is missing."""
    _library()


class KeyMap:
    """Gives keys rows 1, 2, 3, … in the order of their insertion. One thread at a time may use it.

    Args:
        capacity: the most rows, below 2**32 - 1. Address space is reserved for them; memory is
            taken as keys are inserted.

    Raises:
        ImportError: the compiled map isn't built.
        MemoryError: there isn't enough address space.
    """

    def __init__(self, capacity: int):
        self._library, self._capacity = _library(), capacity
        self._map = self._library.keymap_new(capacity)
        if not self._map:
            raise MemoryError(f"a key map for {counted(capacity, 'row')} can not be reserved")

    def __del__(self) -> None:
        if getattr(self, "_map", None):
            self._library.keymap_free(self._map)
            self._map = None

    def __len__(self) -> int:
        return int(self._library.keymap_count(self._map))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of memory in use."""
        return int(self._library.keymap_bytes(self._map))

    def keys(self, first: int, last: int) -> np.ndarray:
        """Returns the keys of the rows from `first` to before `last`, int64.

        The array is a view, valid while the map lives.
        """
        if not 1 <= first <= last <= len(self) + 1:
            raise IndexError(f"rows [{first}, {last}) of 1 … {len(self)}")
        if first == last:
            return np.empty(0, np.int64)
        address = self._library.keymap_keys(self._map) + 8 * first
        raw: Any = (ctypes.c_int64 * (last - first)).from_address(address)
        return np.frombuffer(raw, np.int64)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of the int64 `keys`, in their shape, int64; 0 for unknown keys."""
        keys = np.ascontiguousarray(keys, np.int64)
        rows = np.empty(keys.shape, np.int64)
        self._library.keymap_find(self._map, keys.ctypes.data, keys.size, rows.ctypes.data)
        return rows

    def find_or_insert(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of the int64 `keys`, int64; missing keys are inserted.

        Raises:
            MemoryError: the map is full, or can't grow. The keys before the first one without a
                place have been inserted.
        """
        keys = np.ascontiguousarray(keys, np.int64)
        rows = np.empty(keys.shape, np.int64)
        new = self._library.keymap_find_or_insert(
            self._map, keys.ctypes.data, keys.size, rows.ctypes.data
        )
        if new == _FULL:
            raise MemoryError(f"it is full: {counted(len(self), 'row')} of {self._capacity:,}")
        if new == _OUT_OF_MEMORY:
            raise MemoryError(f"its key map of {counted(len(self), 'key')} can not grow")
        return rows

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Removes the keys of `rows` [K] int64, ascending and each once.

        Rows stay dense: the last rows move to the places that became free.

        Returns:
            (the rows that moved, their new places), both int64 and ascending.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        check_ascending(rows, len(self))
        moves = np.empty((2, len(rows)), np.int64)
        moved = self._library.keymap_remove(
            self._map, rows.ctypes.data, len(rows), moves[0].ctypes.data, moves[1].ctypes.data
        )
        return moves[0, :moved], moves[1, :moved]


def check_ascending(rows: np.ndarray, count: int) -> None:
    """Raises IndexError unless `rows` are rows of 1 to `count`, ascending and each once."""
    if len(rows) and not (rows[0] >= 1 and rows[-1] <= count and (np.diff(rows) > 0).all()):
        raise IndexError(f"rows to be removed are ascending, of 1 … {count}")
