"""Keeps rows of variables as they are at one moment, while runs change them.

`ops/native/snapshot.h` says how. Rows are copied just before they change, into bounded memory;
everything else is read in place.
"""

from __future__ import annotations

import ctypes
import errno
import functools
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.rows import memory
from collective.ops.rows.data_files import DataFile


@functools.cache
def _library_functions() -> Any:
    functions = native_library.functions()
    number, pointer, code = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("room_new", number, [number, ctypes.c_double]),
        ("room_free", None, [number]),
        ("room_give_up", None, [number]),
        ("room_note_progress", None, [number]),
        ("room_peak", number, [number]),
        ("room_waited_ns", number, [number]),
        ("new", number, [number]),
        ("listen", None, [number]),
        ("read", code, [number, number, pointer, number, pointer]),
        ("end", None, [number]),
    ):
        function = getattr(functions, f"snapshot_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


class CopyRoom:
    """Bounds the memory of copies, for all snapshots of one save.

    Args:
        size: bytes.
        patience: a run that waits for room gives the save up after this many seconds without a
            read.
    """

    def __init__(self, size: int, patience: float):
        self.patience = patience
        self._library = _library_functions()
        self.number: int = self._library.snapshot_room_new(size, patience)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            self._library.snapshot_room_free(self.number)

    @property
    def peak(self) -> int:
        """Returns the most bytes that copies have taken."""
        return int(self._library.snapshot_room_peak(self.number))

    @property
    def waited(self) -> float:
        """Returns how many seconds runs have waited for room."""
        return float(self._library.snapshot_room_waited_ns(self.number)) / 1e9

    def give_up(self) -> None:
        """Ends all waiting; from now on snapshots can't be read."""
        self._library.snapshot_room_give_up(self.number)

    def note_progress(self) -> None:
        """Tells waiting runs that the save makes progress."""
        self._library.snapshot_room_note_progress(self.number)


class RowSnapshot:
    """Holds a snapshot of variables whose rows move together, from `listen` to `end`.

    Attributes:
        room: the room for copies.
    """

    def __init__(self, room: CopyRoom):
        self.room, self._library = room, _library_functions()
        self.number: int = self._library.snapshot_new(room.number)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            self.end()

    def listen(self) -> None:
        """Starts the snapshot, between two runs, once all variables have been added (`hold`)."""
        self._library.snapshot_listen(self.number)

    def rows(self, shard: int, rows: np.ndarray, dim: int, dtype: Any) -> SnapshotSlice:
        """Returns rows as the snapshot has them, to be read once.

        Args:
            shard: the number under which the variable is watched, or was held.
            rows: [b] local rows.
            dim, dtype: the variable's dimension and type.
        """
        return SnapshotSlice(self, shard, np.ascontiguousarray(rows, np.int64), dim, dtype)

    def end(self) -> None:
        """Ends the snapshot, and releases its memory."""
        self._library.snapshot_end(self.number)


class SnapshotSlice:
    """Holds some rows of a variable in a snapshot, which are read once: by `read`, or into a file.

    Attributes:
        shape, dtype, nbytes: as for an array.
    """

    def __init__(self, snapshot: RowSnapshot, shard: int, rows: np.ndarray, dim: int, dtype: Any):
        self._snapshot, self._shard, self._rows = snapshot, shard, rows
        self.shape, self.dtype = (len(rows), dim), np.dtype(dtype)
        self.nbytes = len(rows) * dim * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def read(self) -> np.ndarray:
        """Returns the rows, [b, dim].

        Raises:
            TimeoutError: the save was given up.
        """
        out = memory.aligned(self.shape, self.dtype)
        if _library_functions().snapshot_read(
            self._snapshot.number,
            self._shard,
            self._rows.ctypes.data,
            len(self._rows),
            out.ctypes.data,
        ):
            raise self._given_up()
        return out

    def append_to(self, file: DataFile) -> int:
        """Appends the rows to a file without an intermediate array; returns their checksum.

        Raises:
            TimeoutError: the save was given up.
        """
        checksum = file.append_rows(self._snapshot.number, self._shard, self._rows, self.nbytes)
        if checksum is None:
            raise self._given_up()
        return checksum

    def _given_up(self) -> TimeoutError:
        return TimeoutError(
            errno.ETIMEDOUT,
            f"training waited {self._snapshot.room.patience:.0f} s for room in the buffer, and "
            "nothing was written meanwhile",
        )


class HoldOperation:
    """Makes the operation that adds a variable to a snapshot.

    Args:
        handle: the variable's handle.
    """

    def __init__(self, handle: tf.Tensor):
        self.snapshot, self.shard, self.rows = (tf.placeholder(tf.int64, []) for _ in range(3))
        self.operation: tf.Operation = native_library.library().collective_hold_rows(
            handle, self.snapshot, self.shard, self.rows
        )

    def feeds(self, snapshot: RowSnapshot, shard: int, rows: int) -> dict[tf.Tensor, int]:
        """Returns the feeds of the operation.

        Args:
            snapshot: the snapshot to which the variable is added.
            shard: the number under which it is watched; negative if nothing writes it meanwhile.
            rows: the number of its first rows that belong to the snapshot; all rows if negative.
        """
        return {self.snapshot: snapshot.number, self.shard: shard, self.rows: rows}
