"""Maps keys of dynamic tables to local rows by kernels, of many tables at once:
`collective.ops.keymap` on a device.

The hash table is in the device's memory. The keys by row are in the host's, too: first values are
drawn there, and a checkpoint goes through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops import memory
from collective.ops.gpu.hash_table import MOST_ROWS as MOST_ROWS
from collective.ops.gpu.hash_table import FullError, Inserted
from collective.ops.gpu.kernel_api import Kernels
from collective.ops.gpu.memory_bridge import MemoryBridge
from collective.ops.gpu.segments import Segments


class DeviceKeyMap:
    """Maps keys to the rows 1, 2, 3, … in the order of their insertion: see
    `collective.ops.keymap.KeyMap`.

    Args:
        name: the table's, for errors.
        capacity: the most rows.
        bridge: where it computes.

    Raises:
        MemoryError: there is no room for it.
    """

    def __init__(self, name: str, capacity: int, bridge: MemoryBridge):
        self._bridge, self._count = bridge, 0
        with bridge.call():
            self._table = bridge.kernels.hash_table(name, capacity)
        self._keys = memory.Region(8 * (capacity + 1)).view(capacity + 1, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    def keys(self, first: int, last: int) -> np.ndarray:
        """Returns the int64 keys of the rows from `first` to before `last`: a view, while the map
        lives.
        """
        if not 1 <= first <= last <= self._count + 1:
            raise IndexError(f"rows [{first}, {last}) of 1 … {self._count}")
        return self._keys[first:last]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the int64 rows of the int64 `keys`, of their shape; 0 for a key that isn't there."""
        return self._rows(keys, False)

    def find_or_insert(self, keys: np.ndarray) -> np.ndarray:
        """Returns the int64 rows of the int64 `keys`; inserts those that aren't there.

        Raises:
            MemoryError: as `rows` does.
        """
        return self._rows(keys, True)

    def _rows(self, keys: np.ndarray, insert: bool) -> np.ndarray:
        keys = np.ascontiguousarray(keys, np.int64)
        with self._bridge.call():
            kernels = self._bridge.kernels
            return kernels.download(
                rows(kernels, [self], kernels.upload(keys.reshape(-1)), [keys.size], insert)
            ).reshape(keys.shape)

    def _note(self, keys: np.ndarray) -> None:
        self._keys[self._count + 1 : self._count + 1 + len(keys)] = keys
        self._count += len(keys)


def rows(
    kernels: Kernels, maps: Sequence[DeviceKeyMap], keys: Any, sizes: Sequence[int], insert: bool
) -> Any:
    """Returns the rows of `keys`, [K] int64 on the device, until the next call; new keys are
    inserted, or have row 0.

    Args:
        kernels: the kernels.
        maps: T different ones.
        keys: [K] int64 on the device.
        sizes: how many of them each map has, one after the other.
        insert: whether new keys get rows.

    Raises:
        MemoryError: a map has no rows left for all new keys, of which those that came first have
            got theirs; or none was inserted, as slots can't grow.
    """
    tables, segments = [one._table for one in maps], Segments.of(sizes, range(len(maps)))
    if not insert:
        return kernels.find(tables, keys, segments)
    try:
        inserted = kernels.find_or_insert(tables, keys, segments)
    except FullError as error:
        _note(kernels, maps, error.inserted)
        raise MemoryError(str(error)) from error
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
