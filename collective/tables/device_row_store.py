"""What a session holds of a dynamic table on a device: `store.py` in memory that kernels and
TensorFlow share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops import placement
from collective.ops.gpu import device_key_map
from collective.ops.gpu.kernel_api import Kernels
from collective.ops.gpu.memory_bridge import MemoryBridge
from collective.tables import initializers
from collective.tables.row_store import ROOM, RowColumn, Store, living


class DeviceColumn(RowColumn):
    """One in memory of the device that grows where it is. TensorFlow is told its address, and uses
    it as it uses its own.

    Args:
        name: the variable's, for errors.
        side: where it is.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        dim: int,
        dtype: Any,
        side: MemoryBridge,
        first: np.ndarray | None = None,
    ):
        super().__init__(first)
        self._name, self._side, self._row_bytes = name, side, dim * np.dtype(dtype).itemsize
        with side.call():
            try:
                self._memory = side.reserve(rows * self._row_bytes)
            except (MemoryError, RuntimeError) as error:
                raise MemoryError(
                    f"'{name}' can not reserve {rows * self._row_bytes:,} bytes of "
                    f"address space: {error}. Set "
                    f"COLLECTIVE_COLUMN_GB lower, or {placement.DYNAMIC}=host."
                ) from error
            self._rows = side.within(self._memory, (rows, dim), dtype)
        self.reach(0)

    @property
    def address(self) -> int:
        return self._memory.address

    def offer(self, path: str) -> None:
        pass

    def settle_in(self) -> None:
        pass

    def reach(self, count: int) -> None:
        size = (count + 1) * self._row_bytes
        with self._side.call():
            before = self._memory.taken
            if size <= before:
                return
            try:
                self._side.grow(self._memory, size)
            except MemoryError as error:
                raise MemoryError(
                    f"'{self._name}' has memory for {before // self._row_bytes:,} rows, and needs "
                    f"{size - before:,} bytes more "
                    f"for {count:,}: {error}. {self._side.memory()}, and TensorFlow what it has "
                    f"taken. Train on more ranks; or "
                    f"set {placement.DYNAMIC}=host, which has dynamic tables in the host's "
                    f"memory."
                ) from error
            self._side.within(self._memory, (self._memory.taken - before,), np.uint8, before).fill(
                0
            )

    def read(self, rows: np.ndarray) -> np.ndarray:
        with self._side.call():
            kernels = self._side.kernels
            return kernels.download(self._rows[kernels.upload(rows)])

    def write(self, rows: np.ndarray | slice, values: np.ndarray) -> None:
        if not isinstance(rows, slice):
            # Of a row that is given twice the last values stay; on a device nobody knows which
            # would.
            last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
            rows, values = rows[last], values[last]
        with self._side.call():
            kernels = self._side.kernels
            self._rows[rows if isinstance(rows, slice) else kernels.upload(rows)] = kernels.upload(
                values
            )


def new_store(
    capacity: int, dim: int, dtype: Any, name: str, fill: initializers.Fill, side: MemoryBridge
) -> Store:
    """An empty store; arguments as for `Store` and `DeviceColumn`."""
    return Store(
        device_key_map.DeviceKeyMap(name, capacity, side),
        DeviceColumn(name, capacity + 1, dim, dtype, side),
        side.call,
        dim,
        name,
        fill,
    )


def find(
    kernels: Kernels, numbers: np.ndarray, keys: Any, sizes: Sequence[int], insert: bool
) -> Any:
    """`Store.rows` of several stores at once: [K] int64 on the device, until the next call.

    Args:
        kernels: the kernels.
        numbers: of the stores.
        keys: [K] int64 on the device.
        sizes: how many of them each store has, one after the other.
        insert: whether new keys are inserted; or they have row 0.
    """
    stores: list[Store] = [living(int(number)) for number in numbers]
    with contextlib.ExitStack() as drawing:  # all of them, also where one fails
        for store in stores:
            drawing.callback(store.draw)
        try:
            return device_key_map.rows(
                kernels, [store.keys for store in stores], keys, sizes, insert
            )
        except MemoryError as error:
            raise MemoryError(f"{error}. {ROOM}.") from error
