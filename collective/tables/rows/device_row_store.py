"""Keeps columns of dynamic tables on a device, in memory that kernels and TensorFlow share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from collective.ops import kernel_device
from collective.ops.counting import counted
from collective.ops.gpu import device_key_map
from collective.ops.gpu.kernel_api import Kernels
from collective.ops.gpu.memory_bridge import AdvisedMemoryError, MemoryBridge
from collective.tables.rows import initializers
from collective.tables.rows.row_columns import RowColumn, is_small
from collective.tables.rows.row_store import Store, more_memory, registered

BLOCK_BYTES = 64 << 20  # Of rows that are copied or computed with at once.


class DeviceColumn(RowColumn):
    """Keeps a column in memory of the device that grows in place.

    TensorFlow is told its address, and uses it as its own.

    Args:
        name: the variable's, for errors.
        bridge: shares the device's memory.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        dim: int,
        dtype: Any,
        bridge: MemoryBridge,
        first: np.ndarray | None = None,
    ):
        super().__init__(first)
        self._name, self._bridge, self._row_bytes = name, bridge, dim * np.dtype(dtype).itemsize
        with bridge.call():
            try:
                self._memory = bridge.reserve(rows * self._row_bytes)
            except (MemoryError, RuntimeError) as error:
                raise MemoryError(
                    f"'{name}' can not reserve {rows * self._row_bytes:,} bytes of address space: "
                    f"{error}. Set COLLECTIVE_COLUMN_GB lower, or {kernel_device.DYNAMIC}=host."
                ) from error
            self._rows = bridge.within(self._memory, (rows, dim), dtype)
        self.ensure_capacity(0)

    @property
    def address(self) -> int:
        return self._memory.address

    def expose(self, path: str) -> None:
        pass

    def adopt_mapping(self) -> None:
        pass

    def ensure_capacity(self, count: int) -> None:
        size = (count + 1) * self._row_bytes
        with self._bridge.call():
            before = self._memory.taken
            if size <= before:
                return
            try:
                self._bridge.grow(self._memory, size)
            except MemoryError as error:
                raise AdvisedMemoryError(
                    f"'{self._name}' has memory for "
                    f"{counted(before // self._row_bytes, 'row')}, and needs "
                    f"{size - before:,} bytes more for {count:,}: {error}. "
                    f"{self._bridge.memory()}, and TensorFlow what it has taken. Train on more "
                    f"ranks; or set {kernel_device.DYNAMIC}=host, which has dynamic tables in the "
                    "host's memory"
                ) from error
            self._bridge.within(
                self._memory, (self._memory.taken - before,), np.uint8, before
            ).fill(0)

    def initialize_rows(self, count: int) -> None:
        with self._bridge.call():  # `close_gaps` holds it: the other lock is the inner one.
            super().initialize_rows(count)

    def read(self, rows: np.ndarray) -> np.ndarray:
        with self._bridge.call():
            kernels = self._bridge.kernels
            return kernels.download(self._rows[kernels.upload(rows)])

    def write(self, rows: np.ndarray | slice, values: np.ndarray) -> None:
        if not isinstance(rows, slice):
            # If a row is given twice, the last values count. A device writes in no order, so it
            # gets each row once.
            last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
            rows, values = rows[last], values[last]
        with self._bridge.call():
            kernels = self._bridge.kernels
            self._rows[rows if isinstance(rows, slice) else kernels.upload(rows)] = kernels.upload(
                values
            )

    def close_gaps(self, from_: np.ndarray, to: np.ndarray, before: int, after: int) -> None:
        """Moves rows, and returns memory that holds no row any more.

        Rows from `filled` on have no values, and perhaps no memory: a gap that one of them moves to
        starts from the initial value.
        """
        with self._bridge.call(), self._initializing:
            has_values = from_ <= self.filled
            started = to[~has_values & (to <= self.filled)]
            from_, to = from_[has_values], to[has_values]
            upload, block = self._bridge.kernels.upload, self.block
            for first in range(0, len(to), block):
                part = slice(first, first + block)
                self._rows[upload(to[part])] = self._rows[upload(from_[part])]
            for first in range(0, len(started), block):
                rows = upload(started[first : first + block])
                self._rows[rows] = 0 if self.first is None else upload(self.first)
            self._rows[after + 1 : min(before, self.filled) + 1] = 0
            self.filled = min(self.filled, after)
            self._bridge.shrink(self._memory, (self.filled + 1) * self._row_bytes)

    @property
    def block(self) -> int:
        """Returns how many rows are worked on at once."""
        return max(1, BLOCK_BYTES // self._row_bytes)

    def is_small(self, count: int, threshold: float) -> np.ndarray:
        """Tells which of rows 1 to `count` are small, see `row_columns.is_small`."""
        found = np.empty(count, bool)
        with self._bridge.call():
            kernels = self._bridge.kernels
            for first in range(0, count, self.block):
                last = min(first + self.block, count)
                rows = self._rows[first + 1 : last + 1]
                found[first:last] = kernels.download(is_small(rows, threshold, kernels.xp))
        return found


class DeviceStore(Store):
    """Holds the keys of a table, the steps of their last uses, and its rows, on a device."""

    def rows(self, keys: np.ndarray, insert: bool, step: int = 0) -> np.ndarray:
        """Returns the local rows of `keys`, see `Store.rows`.

        Args:
            keys: the keys.
            insert: inserts new keys.
            step: the step to which an insertion leads; 0 for none that counts as a use.
        """
        with self._lock(), self._drawing(), _advising():
            return self.keys.find_or_insert(keys, step) if insert else self.keys.find(keys)

    def all_last_uses(self, column: Any) -> np.ndarray:
        """Returns the steps to which the last uses of rows led, which the hash table has."""
        steps: np.ndarray = self.keys.steps()[: len(self)]
        return steps

    def last_uses(self, column: Any, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
        return self.all_last_uses(column)[places - 1]

    def set_last_used(self, rows: np.ndarray, steps: np.ndarray) -> None:
        """Sets the steps to which the last uses of `rows` led, both int64 [K]."""
        self.keys.set_steps(rows, steps)


def new_store(
    capacity: int, dim: int, dtype: Any, name: str, fill: initializers.Fill, bridge: MemoryBridge
) -> DeviceStore:
    """Makes an empty store; arguments as for `Store` and `DeviceColumn`."""
    return DeviceStore(
        device_key_map.DeviceKeyMap(name, capacity, bridge),
        DeviceColumn(name, capacity + 1, dim, dtype, bridge),
        bridge.call,
        dim,
        name,
        fill,
    )


def find(
    kernels: Kernels,
    numbers: np.ndarray,
    keys: Any,
    sizes: Sequence[int],
    steps: Sequence[int] | None,
) -> Any:
    """Returns `Store.rows` of several stores at once: [K] int64 on the device, until the next call.

    Args:
        kernels: the kernels.
        numbers: the stores' numbers.
        keys: [K] int64 on the device.
        sizes: the number of keys of each store, one after the other.
        steps: inserts new keys, which have row 0 otherwise, and notes the step to which the use of
            each store's keys leads; 0 for none that counts.
    """
    stores: list[Store] = [registered(int(number)) for number in numbers]
    with contextlib.ExitStack() as drawing:  # All stores draw, even if one fails.
        for store in stores:
            drawing.callback(store.draw)
        with _advising():
            return device_key_map.rows(
                kernels, [store.keys for store in stores], keys, sizes, steps
            )


@contextlib.contextmanager
def _advising() -> Iterator[None]:
    """Adds to an error what to do if a map is full."""
    try:
        yield
    except device_key_map.FullMapError as error:
        raise AdvisedMemoryError(f"{error}. {more_memory()}.") from error
