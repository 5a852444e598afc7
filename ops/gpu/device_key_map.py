"""Maps keys of many dynamic tables to local rows at once, by kernels:
`collective.ops.rows.keymap` on a device.

The hash table is in the device's memory, with the step to which the last use of each key led. The
keys by row are in the host's memory, too: initial values are drawn there, checkpoints use them, and
a removal tells the device which keys to remove.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.hash_table import MOST_ROWS as MOST_ROWS
from collective.ops.gpu.hash_table import FullError, Inserted
from collective.ops.gpu.kernel_api import Kernels
from collective.ops.gpu.memory_bridge import MemoryBridge
from collective.ops.gpu.segments import Segments
from collective.ops.rows import memory
from collective.ops.rows.keymap import check_ascending


class FullMapError(MemoryError):
    """Says that a map has no rows left for new keys."""


class DeviceKeyMap:
    """Maps keys to the rows 1, 2, 3, … in the order of their insertion: see
    `collective.ops.rows.keymap.KeyMap`.

    Args:
        name: the table's name, for errors.
        capacity: the most rows.
        bridge: where it computes.

    Raises:
        MemoryError: there isn't enough memory.
    """

    def __init__(self, name: str, capacity: int, bridge: MemoryBridge):
        self._bridge, self._count = bridge, 0
        with bridge.call():
            self._table = bridge.kernels.hash_table(name, capacity)
        self._keys = memory.Region(8 * (capacity + 1)).view(capacity + 1, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    def keys(self, first: int, last: int) -> np.ndarray:
        """Returns the int64 keys of the rows from `first` to before `last`: a view, valid while the
        map lives.
        """
        if not 1 <= first <= last <= self._count + 1:
            raise IndexError(f"rows [{first}, {last}) of 1 … {self._count}")
        return self._keys[first:last]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the int64 rows of the int64 `keys`, of their shape; 0 for an unknown key."""
        return self._rows(keys, None)

    def find_or_insert(self, keys: np.ndarray, step: int = 0) -> np.ndarray:
        """Returns the int64 rows of the int64 `keys`; inserts missing ones.

        Args:
            keys: the keys.
            step: the step to which this use leads; 0 for a use that doesn't count.

        Raises:
            MemoryError: as `rows` does.
        """
        return self._rows(keys, step)

    def _rows(self, keys: np.ndarray, step: int | None) -> np.ndarray:
        keys = np.ascontiguousarray(keys, np.int64)
        with self._bridge.call():
            kernels = self._bridge.kernels
            steps = None if step is None else [step]
            return kernels.download(
                rows(kernels, [self], kernels.upload(keys.reshape(-1)), [keys.size], steps)
            ).reshape(keys.shape)

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Removes the keys of `rows` [K] int64, ascending and each once, as `KeyMap.remove` does.

        Returns:
            (the rows that moved, their new rows), both int64 and ascending.
        """
        check_ascending(rows, self._count)
        left = self._count - len(rows)
        to = rows[rows <= left]
        is_kept = np.ones(len(rows), bool)  # True for the rows after the last one left.
        is_kept[rows[rows > left] - left - 1] = False
        from_ = np.flatnonzero(is_kept) + left + 1
        with self._bridge.call():
            self._bridge.kernels.remove(self._table, self._keys[rows], self._keys[from_], to)
            self._keys[to] = self._keys[from_]
            self._count = left
        return from_, to

    def steps(self) -> np.ndarray:
        """Returns the step to which the last use of each row led, int64 for rows 1 to the last."""
        with self._bridge.call():
            return self._bridge.kernels.steps(self._table)

    def set_steps(self, rows: np.ndarray, steps: np.ndarray) -> None:
        """Sets the steps to which the last uses of `rows` led, both [K] int64."""
        with self._bridge.call():
            self._bridge.kernels.set_steps(self._table, self._keys[rows], steps)

    def _note(self, keys: np.ndarray) -> None:
        self._keys[self._count + 1 : self._count + 1 + len(keys)] = keys
        self._count += len(keys)


def rows(
    kernels: Kernels,
    maps: Sequence[DeviceKeyMap],
    keys: Any,
    sizes: Sequence[int],
    steps: Sequence[int] | None,
) -> Any:
    """Returns the rows of `keys`, [K] int64 on the device, valid until the next call. New keys are
    inserted, or have row 0.

    Args:
        kernels: the kernels.
        maps: T different maps.
        keys: [K] int64 on the device.
        sizes: how many of the keys belong to each map, one map after the other.
        steps: if given, new keys are inserted (otherwise they have row 0), and the step to which
            the use of each map's keys leads is noted; 0 for a use that doesn't count.

    Raises:
        FullMapError: a map has no rows left for all new keys; the first of them have got theirs.
        MemoryError: no key was inserted, as slots can't grow.
    """
    tables, segments = [one._table for one in maps], Segments.of(sizes, range(len(maps)))
    if steps is None:
        return kernels.find(tables, keys, segments)
    try:
        inserted = kernels.find_or_insert(tables, keys, segments, steps)
    except FullError as error:
        _note(kernels, maps, error.inserted)
        raise FullMapError(str(error)) from error
    _note(kernels, maps, inserted)
    return inserted.rows


def _note(kernels: Kernels, maps: Sequence[DeviceKeyMap], inserted: Inserted) -> None:
    counts = kernels.download(inserted.new_counts)
    total = int(counts.sum())
    if total == 0:
        return
    keys, numbers = (
        kernels.download(inserted.new_keys[:total]),
        kernels.download(inserted.new_rows[:total]),
    )
    ends = np.cumsum(counts)
    for one, first, end in zip(maps, ends - counts, ends):
        there = numbers[first:end] > 0
        one._note(keys[first:end][there])
