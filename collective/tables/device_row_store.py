"""Keeps columns of dynamic tables on a device, in memory that kernels and TensorFlow share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops import placement
from collective.ops.counting import counted
from collective.ops.gpu import device_key_map
from collective.ops.gpu.kernel_api import Kernels
from collective.ops.gpu.memory_bridge import MemoryBridge
from collective.tables import initializers
from collective.tables.row_store import MORE_MEMORY, RowColumn, Store, registered


class DeviceColumn(RowColumn):
    """Keeps a column in memory of the device that grows where it is.

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
                    f"{error}. Set COLLECTIVE_COLUMN_GB lower, or {placement.DYNAMIC}=host."
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
                raise MemoryError(
                    f"'{self._name}' has memory for "
                    f"{counted(before // self._row_bytes, 'row')}, and needs "
                    f"{size - before:,} bytes more for {count:,}: {error}. "
                    f"{self._bridge.memory()}, and TensorFlow what it has taken. Train on more "
                    f"ranks; or set {placement.DYNAMIC}=host, which has dynamic tables in the "
                    "host's memory."
                ) from error
            self._bridge.within(
                self._memory, (self._memory.taken - before,), np.uint8, before
            ).fill(0)

    def read(self, rows: np.ndarray) -> np.ndarray:
        with self._bridge.call():
            kernels = self._bridge.kernels
            return kernels.download(self._rows[kernels.upload(rows)])

    def write(self, rows: np.ndarray | slice, values: np.ndarray) -> None:
        if not isinstance(rows, slice):
            # Of a row that is given twice the last values stay. A device writes in no order: it
            # gets each row once.
            last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
            rows, values = rows[last], values[last]
        with self._bridge.call():
            kernels = self._bridge.kernels
            self._rows[rows if isinstance(rows, slice) else kernels.upload(rows)] = kernels.upload(
                values
            )


def new_store(
    capacity: int, dim: int, dtype: Any, name: str, fill: initializers.Fill, bridge: MemoryBridge
) -> Store:
    """Makes an empty store; arguments as for `Store` and `DeviceColumn`."""
    return Store(
        device_key_map.DeviceKeyMap(name, capacity, bridge),
        DeviceColumn(name, capacity + 1, dim, dtype, bridge),
        bridge.call,
        dim,
        name,
        fill,
    )


def find(
    kernels: Kernels, numbers: np.ndarray, keys: Any, sizes: Sequence[int], insert: bool
) -> Any:
    """Returns `Store.rows` of several stores at once: [K] int64 on the device, until the next call.

    Args:
        kernels: the kernels.
        numbers: the stores' numbers.
        keys: [K] int64 on the device.
        sizes: the number of keys of each store, one after the other.
        insert: inserts new keys, which have row 0 otherwise.
    """
    stores: list[Store] = [registered(int(number)) for number in numbers]
    with contextlib.ExitStack() as drawing:  # All stores draw, also if one fails.
        for store in stores:
            drawing.callback(store.draw)
        try:
            return device_key_map.rows(
                kernels, [store.keys for store in stores], keys, sizes, insert
            )
        except MemoryError as error:
            raise MemoryError(f"{error}. {MORE_MEMORY}.") from error
