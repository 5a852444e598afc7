"""Offers the kernels as one object, with which a group's exchange (`requests`, `responses`,
`pooling`) is written.

Rows are float32. An array that a method returns holds until the next call of the same method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu import (
    distinct,
    gather,
    hash_table,
    hash_table_maintenance,
    occurrences,
    partition,
    pool,
    sums,
    update,
)
from collective.ops.gpu.distinct import Distinct
from collective.ops.gpu.hash_table import HashTable, Inserted
from collective.ops.gpu.occurrences import Occurrences
from collective.ops.gpu.partition import Partition
from collective.ops.gpu.pool import Ids, Lookup, Terms
from collective.ops.gpu.rules import Rule
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sums import Rows
from collective.ops.gpu.update import Table
from collective.ops.gpu.workspace import Workspace


class Joined(NamedTuple):
    """Holds several results side by side in one array, which go to TensorFlow in one piece.

    Attributes:
        array: [K].
        sizes: how many elements each result has.
        dims: the number of columns of each result, 0 for a vector; None if all are vectors.
    """

    array: Any
    sizes: Sequence[int]
    dims: Sequence[int] | None = None


class Kernels:
    """Launches kernels. Arguments are those of the kernels' modules, without the workspace.

    Args:
        workspace: where kernels write; `workspace.device` runs them.

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

    def rows(self, arrays: Sequence[Any]) -> Any:
        """Numbers the rows of several matrices through, as `pool`, `sum_rows` and `update` take
        them.
        """
        return Rows.of(arrays, self._device)

    def flat(self, buffer: Any, lengths: np.ndarray, dims: np.ndarray) -> Any:
        """Numbers the rows of a buffer through, in which runs of `lengths` rows of `dims` elements
        lie one after the other.
        """
        return Rows.flat(
            buffer, Segments.of(lengths, range(len(dims))), dims.tolist(), self._device
        )

    def spans(self, starts: np.ndarray, lengths: np.ndarray) -> Any:
        """Returns an index of `lengths[i]` elements from `starts[i]` on, for each i, one after the
        other: a slice if they are side by side.
        """
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        if len(starts) == 0:
            return slice(0, 0)
        if np.all(starts[1:] == starts[:-1] + lengths[:-1]):
            return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
        ends = np.cumsum(lengths)
        at = self.xp.arange(int(ends[-1]), dtype=np.int64)
        shifts = self.upload(starts - (ends - lengths))
        return at + shifts[self.xp.searchsorted(self.upload(ends), at, side="right")]

    def offsets(self, samples: Any, count: int) -> Any:
        """Returns [count + 1] int32, where each of `count` samples begins in the ascending
        `samples` [K].
        """
        numbers = self.xp.arange(count + 1, dtype=samples.dtype)
        return self.xp.searchsorted(samples, numbers).astype(np.int32)

    def each_once(self, count: int) -> Occurrences:
        """Returns the occurrences of `count` rows that occur once, in their order."""
        none = self.xp.zeros((0, 3), np.uint32)
        return Occurrences(
            self.xp.arange(count + 1, dtype=np.int32),
            self.xp.arange(count, dtype=np.int32),
            self.xp.zeros(2, np.uint32),
            none,
            none,
        )

    def distinct(self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int) -> Distinct:
        return distinct.distinct(keys, segments, kinds, ranks, self._workspace)

    def partition(
        self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int
    ) -> Partition:
        return partition.partition(keys, segments, kinds, ranks, self._workspace)

    def local_rows(self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int) -> Any:
        return partition.local_rows(keys, segments, kinds, ranks, self._workspace)

    def gather(self, tables: Sequence[Any], rows: Any, segments: Segments) -> Any:
        return gather.gather(tables, rows, segments, self._workspace)

    def pool(self, lookups: Sequence[Lookup], rows: Sequence[Any], ids: Ids) -> Any:
        """Pools as `pool.pool_flat` does."""
        return pool.pool_flat(lookups, rows, ids, self._workspace)

    def pool_terms(
        self,
        lookups: Sequence[Lookup],
        rows: Sequence[Any],
        ids: Ids,
        gradients: Any,
        of_weights: bool = False,
    ) -> Terms:
        return pool.pool_terms(lookups, rows, ids, gradients, self._workspace, of_weights)

    def occurrences(self, numbers: Any, rows: int) -> Occurrences:
        return occurrences.occurrences(numbers, rows, self._workspace)

    def sum_rows(
        self,
        gradients: Any,
        occurrences: Occurrences,
        segments: Segments,
        dims: Sequence[int],
        terms: Any = None,
        scale: float = 1.0,
        along: Any = None,
        own: Any = None,
    ) -> Any:
        return sums.sum_rows(
            gradients, occurrences, segments, dims, self._workspace, terms, scale, along, own
        )

    def update(
        self,
        rule: Rule,
        tables: Sequence[Table],
        rows: Any,
        segments: Segments,
        gradients: Any,
        occurrences: Occurrences,
    ) -> None:
        update.update(rule, tables, rows, segments, gradients, occurrences, self._workspace)

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
