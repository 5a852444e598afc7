"""Offers the kernels of dynamic tables' keys as one object.

Rows are float32. An array that a method returns is valid until the next call of the same method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu import hash_table, hash_table_maintenance
from collective.ops.gpu.hash_table import HashTable, Inserted
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.workspace import Workspace


class Kernels:
    """Launches kernels. Arguments are those of the kernels' modules, without the workspace.

    Args:
        workspace: the memory to which kernels write; `workspace.device` runs them.

    Attributes:
        xp: the array module, `cupy` or `numpy`.
    """

    xp: Any

    def __init__(self, workspace: Workspace):
        self._workspace, self._device, self.xp = workspace, workspace.device, workspace.device.xp

    def upload(self, values: np.ndarray) -> Any:
        """Returns a copy on the device."""
        array = self._device.empty(values.shape, values.dtype)
        self._device.upload(np.ascontiguousarray(values), array)
        return array

    def download(self, array: Any) -> np.ndarray:
        """Returns a copy on the host, which waits for it."""
        return self._device.download(array)

    def hash_table(self, name: str, most_rows: int) -> Any:
        """Makes an empty hash table."""
        return HashTable(name, self._device, most_rows=most_rows)

    def find(self, tables: Sequence[Any], keys: Any, segments: Segments) -> Any:
        return hash_table.find(tables, keys, segments, self._workspace)

    def find_or_insert(
        self, tables: Sequence[Any], keys: Any, segments: Segments, steps: Sequence[int]
    ) -> Inserted:
        return hash_table.find_or_insert(tables, keys, segments, steps, self._workspace)

    def remove(self, table: Any, gone: np.ndarray, moved: np.ndarray, to: np.ndarray) -> None:
        hash_table_maintenance.remove(table, gone, moved, to, self._workspace)

    def steps(self, table: Any) -> np.ndarray:
        return hash_table_maintenance.steps(table)

    def set_steps(self, table: Any, keys: np.ndarray, steps: np.ndarray) -> None:
        hash_table_maintenance.set_steps(table, keys, steps, self._workspace)
