"""Announces writes of shards' rows, and keeps sets of changed rows.

`ops/native/row_changes.h` describes the announcements and listeners, and `ops/native/change_set.cc`
what is kept: for one consumer, which rows of a shard were written, and which keys were removed,
since it last asked.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library

_numbers = itertools.count(1)

# Operations of the compiled library that announce their writes themselves.
SELF_ANNOUNCING = frozenset(
    {
        "CollectiveSparseUpdate",
        "CollectiveSparsePoolUpdate",
        "CollectiveSparseReduceUpdate",
        "CollectiveFindRows",
        "CollectiveAdmitRows",
        "CollectiveSettleSlots",
    }
)


@functools.cache
def _library_functions() -> Any:
    functions = native_library.functions()
    number, pointer, code = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("row_changes_announce", None, [number, pointer, number]),
        ("change_set_new", None, [number, number]),
        ("change_set_free", None, [number]),
        ("change_set_listen", code, [number, number]),
        ("change_set_leave", None, [number, number]),
        ("change_set_begin", None, [number]),
        ("change_set_done", None, [number]),
        ("change_set_undo", None, [number]),
        ("change_set_sizes", code, [number, pointer, pointer, pointer]),
        ("change_set_read", None, [number, pointer, pointer, pointer]),
    ):
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions


def announce_write(resource: tf.Tensor, rows: tf.Tensor | None) -> tf.Operation:
    """Makes the operation that announces a write.

    Args:
        resource: the handle of the variable that is about to be written.
        rows: the local rows, int32 or int64 of any shape; None: all of them.
    """
    announced: tf.Operation = native_library.library().collective_announce_writes(
        resource, tf.constant([], tf.int64) if rows is None else rows, all=rows is None
    )
    return announced


def watch(resource: tf.Tensor, store: tf.Tensor | None = None) -> tf.Tensor:
    """Makes the operation that returns the number of a shard for listeners, int64 scalar.

    It may run any number of times: in one session a variable has one number.

    Args:
        resource: the variable's handle.
        store: the number of the row store, for a dynamic table's own variable. Changes of its keys
            are announced to the listeners of the shard.
    """
    number: tf.Tensor = native_library.library().collective_watch_shard(
        resource, tf.zeros([], tf.int64) if store is None else store
    )
    return number


def announce(shard: int, rows: np.ndarray | None) -> None:
    """Announces a write by Python into a shard's memory: of local rows; None: of all rows."""
    if rows is None:
        _library_functions().row_changes_announce(shard, None, -1)
        return
    rows = np.ascontiguousarray(rows, np.int64)
    _library_functions().row_changes_announce(shard, rows.ctypes.data, rows.size)


@dataclasses.dataclass(frozen=True)
class Changes:
    """Tells what has changed.

    Attributes:
        all: whether every row counts as changed, and any key may have gone; the others are unused.
        rows: [R] int64 local rows that were written, ascending. Some may not have changed.
        removed: [K] int64 keys that were removed, each once. Some may be back.
        in_file: [F] int64 keys that had changed when they moved to the table's file, each once.
            They may be back, or gone.
    """

    all: bool
    rows: np.ndarray
    removed: np.ndarray
    in_file: np.ndarray


class ChangeSet:
    """Notes which rows are written, for one consumer, from `listen` on.

    Args:
        rows: how many rows a shard can have; larger numbers aren't rows.
    """

    def __init__(self, rows: int):
        self._number, self._shards = next(_numbers), set[int]()
        self._native = _library_functions()
        self._native.change_set_new(self._number, rows)

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            for shard in self._shards:
                self._native.change_set_leave(self._number, shard)
            self._native.change_set_free(self._number)

    def listen(self, shards: Sequence[int]) -> bool:
        """Listens from now on to exactly these shards, given by their numbers.

        Returns:
            True if it listened to all of them before.
        """
        wanted = set(shards)
        was_complete = wanted <= self._shards
        for shard in self._shards - wanted:
            self._native.change_set_leave(self._number, shard)
        for shard in wanted - self._shards:
            if not self._native.change_set_listen(self._number, shard):
                raise RuntimeError("a table's session was closed while its changes were looked at")
        self._shards = wanted
        return was_complete

    def begin(self) -> None:
        """Sets aside what has changed until now. Call `done` or `undo` afterwards."""
        self._native.change_set_begin(self._number)

    def changes(self) -> Changes:
        """Returns what was set aside, with the current places of the rows."""
        rows, removed, in_file = (ctypes.c_int64() for _ in range(3))
        is_all = self._native.change_set_sizes(
            self._number, ctypes.byref(rows), ctypes.byref(removed), ctypes.byref(in_file)
        )
        arrays = [np.empty(size.value, np.int64) for size in (rows, removed, in_file)]
        self._native.change_set_read(self._number, *(array.ctypes.data for array in arrays))
        return Changes(bool(is_all), arrays[0], np.unique(arrays[1]), np.unique(arrays[2]))

    def done(self) -> None:
        """Forgets what was set aside: the consumer has it."""
        self._native.change_set_done(self._number)

    def undo(self) -> None:
        """Counts what was set aside as still changed."""
        self._native.change_set_undo(self._number)
