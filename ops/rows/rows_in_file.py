"""Moves rows of compiled row stores to separate files, and reads them there.

The stores are known by their numbers; see `ops/native/rows_in_file.cc`. Code that moves, removes or
lists rows makes sure that no run works on the store at the same time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.rows import memory

IN_FILE = 2**62  # the row that `locate` returns for a key in the file

_NO_MEMORY = int(tf.errors.RESOURCE_EXHAUSTED)
_MESSAGE_BYTES = 4096


@functools.cache
def _library_functions() -> Any:
    functions = native_library.functions()
    number, size, pointer, code = ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("row_store_keep_in_file", code, [number, ctypes.c_char_p, size, pointer, size]),
        ("row_stores_overfull", size, []),
        ("row_store_is_overfull", code, [number]),
        ("row_store_count_in_memory", size, [number]),
        ("row_store_file_count", size, [number]),
        ("row_store_file_bytes", size, [number]),
        ("row_store_file_keys", pointer, [number]),
        ("row_store_move_to_file", code, [number, pointer, size, number, pointer, size]),
        ("row_store_file_notes", None, [number, pointer, size, pointer]),
        ("row_store_locate", None, [number, pointer, size, pointer]),
        (
            "row_store_read",
            code,
            [number, pointer, size, pointer, size, pointer, pointer, size],
        ),
        ("row_store_remove_in_file", size, [number, pointer, size]),
        ("row_store_clear_file", None, [number]),
    ):
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions


def _call(function: Any, *arguments: Any) -> None:
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    failed = function(*arguments, message, _MESSAGE_BYTES)
    if failed:
        error = MemoryError if failed == _NO_MEMORY else OSError
        raise error(message.value.decode(errors="replace"))


def keep_in_file(number: int, folder: str, memory_bytes: int) -> None:
    """Gives a store without rows a file, to which `move_to_file` moves rows.

    Args:
        number: the store's number.
        folder: the folder in which the file is made. It has no name there, and goes with the store.
        memory_bytes: how much memory rows and slots may take.

    Raises:
        OSError: the file can't be made.
        MemoryError: there isn't enough address space for its index.
    """
    functions = _library_functions()
    _call(functions.row_store_keep_in_file, number, folder.encode(), memory_bytes)


def any_is_overfull() -> bool:
    """Tells whether any store of the process has more rows in memory than it should."""
    return bool(_library_functions().row_stores_overfull())


def is_overfull(number: int) -> bool:
    """Tells whether a store has more rows in memory than it should."""
    return bool(_library_functions().row_store_is_overfull(number))


def count_in_memory(number: int) -> int:
    """Returns how many rows of a store are in memory and have values."""
    return int(_library_functions().row_store_count_in_memory(number))


def file_bytes(number: int) -> int:
    """Returns the size of a store's file; 0 if it has none."""
    return int(_library_functions().row_store_file_bytes(number))


def keys(number: int) -> np.ndarray:
    """Returns a copy of the keys in a store's file, int64, in no order."""
    functions = _library_functions()
    count = int(functions.row_store_file_count(number))
    address = functions.row_store_file_keys(number) + 8
    return memory.array_at(address, (count,), np.int64, None).copy()


def move_to_file(number: int, slots: Sequence[int], noted: int | None) -> None:
    """Moves the least recently used rows, if there are more than there is memory for.

    Args:
        number: the store's number.
        slots: the numbers of all `CompiledColumn`s that the table has in addition to its rows.
        noted: the number of the column, of [1] int64, whose values in the file `notes` returns; or
            None.

    Raises:
        OSError: the file can't be written, or not be read while it is compacted. No row is lost.
        MemoryError: the index of the file can't grow.
    """
    columns = np.array(slots, np.int64)
    _call(
        _library_functions().row_store_move_to_file,
        number,
        columns.ctypes.data,
        columns.size,
        noted or 0,
    )


def notes(number: int, keys: np.ndarray) -> np.ndarray:
    """Returns what memory notes about `keys` in a store's file, int64; 0 if nothing."""
    keys = np.ascontiguousarray(keys, np.int64)
    noted = np.empty(keys.shape, np.int64)
    _library_functions().row_store_file_notes(
        number, keys.ctypes.data, keys.size, noted.ctypes.data
    )
    return noted


def locate(number: int, keys: np.ndarray) -> np.ndarray:
    """Returns the local rows of `keys` in memory, int64; `IN_FILE`, or 0 for unknown keys."""
    keys = np.ascontiguousarray(keys, np.int64)
    rows = np.empty(keys.shape, np.int64)
    _library_functions().row_store_locate(number, keys.ctypes.data, keys.size, rows.ctypes.data)
    return rows


def read(number: int, keys: np.ndarray, columns: Sequence[int], out: Sequence[np.ndarray]) -> None:
    """Copies the columns' values of `keys`, wherever the rows are; zeros for unknown keys.

    Args:
        number: the store's number.
        keys: [b] int64.
        columns: the numbers of `CompiledColumn`s, which may include that of the rows.
        out: for each column an array [b, D] of its type.

    Raises:
        OSError: the file can't be read.
    """
    keys = np.ascontiguousarray(keys, np.int64)
    numbers = np.array(columns, np.int64)
    addresses = np.array([array.ctypes.data for array in out], np.uint64)
    _call(
        _library_functions().row_store_read,
        number,
        keys.ctypes.data,
        keys.size,
        numbers.ctypes.data,
        numbers.size,
        addresses.ctypes.data,
    )


def remove(number: int, keys: np.ndarray) -> int:
    """Removes those `keys` that are in a store's file. Returns how many."""
    keys = np.ascontiguousarray(keys, np.int64)
    functions = _library_functions()
    return int(functions.row_store_remove_in_file(number, keys.ctypes.data, keys.size))


def clear(number: int) -> None:
    """Removes all keys that are in a store's file."""
    _library_functions().row_store_clear_file(number)
