"""The kernels' functions, on a device or in NumPy: what a group's exchange is written with
(`asking`, `pooling`).

`OnDevice` launches kernels. `InNumPy` is its double: the references, by which all that is built
upon them runs without a GPU. Rows are float32. Arrays that a function returns hold until the next
call.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu import (
    distinct,
    gather,
    hash_table,
    occurrences,
    partition,
    pool,
    sums,
    update,
)
from collective.ops.gpu.distinct import Distinct
from collective.ops.gpu.elements import FLOAT32
from collective.ops.gpu.hash_table import Inserted
from collective.ops.gpu.hash_table_state import HashTable
from collective.ops.gpu.occurrences import Occurrences
from collective.ops.gpu.partition import Partition
from collective.ops.gpu.pool import Ids, Lookup, Terms
from collective.ops.gpu.reference import distinct as np_distinct
from collective.ops.gpu.reference import gather as np_gather
from collective.ops.gpu.reference import hash_table as np_hash_table
from collective.ops.gpu.reference import occurrences as np_occurrences
from collective.ops.gpu.reference import partition as np_partition
from collective.ops.gpu.reference import pool as np_pool
from collective.ops.gpu.reference import sums as np_sums
from collective.ops.gpu.reference import update as np_update
from collective.ops.gpu.rules import Rule
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sums import Rows
from collective.ops.gpu.update import Table
from collective.ops.gpu.workspace import Workspace


class Joined(NamedTuple):
    """Several results in one array, which are handed on at once.

    Attributes:
        array: [K].
        sizes: how many elements each of them has.
        dims: of those that are matrices how many columns, of vectors 0; None if all are vectors.
    """

    array: Any
    sizes: Sequence[int]
    dims: Sequence[int] | None = None


class Functions(abc.ABC):
    """What there is. Arguments are those of the kernels' modules, without the workspace.

    Attributes:
        xp: the array module, `cupy` or `numpy`.
    """

    xp: Any

    @abc.abstractmethod
    def upload(self, values: np.ndarray) -> Any:
        """A copy on the device."""

    @abc.abstractmethod
    def download(self, array: Any) -> np.ndarray:
        """A copy on the host, which waits for it."""

    @abc.abstractmethod
    def rows(self, arrays: Sequence[Any]) -> Any:
        """Rows [R, D] of several arrays, numbered through, as `pool`, `sum_rows` and `update` take
        them.
        """

    @abc.abstractmethod
    def flat(self, buffer: Any, lengths: np.ndarray, dims: np.ndarray) -> Any:
        """`rows` of a buffer in which runs of `lengths` rows of `dims` elements lie one after the
        other.
        """

    def spans(self, starts: np.ndarray, lengths: np.ndarray) -> Any:
        """What to index an array with for `lengths[i]` elements from `starts[i]` on, for each i,
        one after the other.
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
        """[count + 1] int32, where each of `count` samples begins in `samples` [K], which ascend."""
        return self.xp.searchsorted(samples, self.xp.arange(count + 1, dtype=samples.dtype)).astype(
            np.int32
        )

    def each_once(self, count: int) -> Occurrences:
        """What `occurrences` returns of `count` rows that occur once, in their order."""
        none = self.xp.zeros((0, 3), np.uint32)
        return Occurrences(
            self.xp.arange(count + 1, dtype=np.int32),
            self.xp.arange(count, dtype=np.int32),
            self.xp.zeros(2, np.uint32),
            none,
            none,
        )

    @abc.abstractmethod
    def distinct(
        self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int
    ) -> Distinct: ...

    @abc.abstractmethod
    def partition(
        self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int
    ) -> Partition: ...

    @abc.abstractmethod
    def local_rows(
        self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int
    ) -> Any: ...

    @abc.abstractmethod
    def gather(self, tables: Sequence[Any], rows: Any, segments: Segments) -> Any: ...

    @abc.abstractmethod
    def pool(self, lookups: Sequence[Lookup], rows: Sequence[Any], ids: Ids) -> Any:
        """`pool_flat`."""

    @abc.abstractmethod
    def pool_terms(
        self,
        lookups: Sequence[Lookup],
        rows: Sequence[Any],
        ids: Ids,
        gradients: Any,
        of_weights: bool = False,
    ) -> Terms: ...

    @abc.abstractmethod
    def occurrences(self, numbers: Any, rows: int) -> Occurrences: ...

    @abc.abstractmethod
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
    ) -> Any: ...

    @abc.abstractmethod
    def update(
        self,
        rule: Rule,
        tables: Sequence[Table],
        rows: Any,
        segments: Segments,
        gradients: Any,
        occurrences: Occurrences,
    ) -> None: ...

    @abc.abstractmethod
    def hash_table(self, name: str, most_rows: int) -> Any:
        """A new hash table."""

    @abc.abstractmethod
    def find(self, tables: Sequence[Any], keys: Any, segments: Segments) -> Any: ...

    @abc.abstractmethod
    def find_or_insert(self, tables: Sequence[Any], keys: Any, segments: Segments) -> Inserted: ...


class OnDevice(Functions):
    """Kernels.

    Args:
        workspace: where they write; `workspace.device` runs them.
    """

    def __init__(self, workspace: Workspace):
        self._workspace, self._device, self.xp = workspace, workspace.device, workspace.device.xp

    def upload(self, values: np.ndarray) -> Any:
        array = self._device.empty(values.shape, values.dtype)
        self._device.upload(np.ascontiguousarray(values), array)
        return array

    def download(self, array: Any) -> np.ndarray:
        return self._device.download(array)

    def rows(self, arrays: Sequence[Any]) -> Rows:
        return Rows.of(arrays, FLOAT32, self._device)

    def flat(self, buffer: Any, lengths: np.ndarray, dims: np.ndarray) -> Rows:
        return Rows.flat(
            buffer, Segments.of(lengths, range(len(dims))), dims.tolist(), FLOAT32, self._device
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
        return gather.gather(tables, rows, segments, FLOAT32, FLOAT32, self._workspace)

    def pool(self, lookups: Sequence[Lookup], rows: Sequence[Any], ids: Ids) -> Any:
        return pool.pool_flat(lookups, rows, ids, FLOAT32, self._workspace)

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
            gradients,
            occurrences,
            segments,
            dims,
            FLOAT32,
            self._workspace,
            terms,
            scale,
            along,
            own,
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

    def hash_table(self, name: str, most_rows: int) -> HashTable:
        return HashTable(name, self._device, most_rows=most_rows)

    def find(self, tables: Sequence[Any], keys: Any, segments: Segments) -> Any:
        return hash_table.find(tables, keys, segments, self._workspace)

    def find_or_insert(self, tables: Sequence[Any], keys: Any, segments: Segments) -> Inserted:
        return hash_table.find_or_insert(tables, keys, segments, 0, self._workspace)


class Runs:
    """Matrices whose rows are numbered through: what the references take in place of `Rows`."""

    def __init__(
        self, matrices: Sequence[np.ndarray], dims: Sequence[int] | np.ndarray | None = None
    ):
        self.matrices = (
            list(matrices)
            if dims is None
            else [one.reshape(-1, dim) for one, dim in zip(matrices, dims)]
        )
        self._ends = np.cumsum([len(matrix) for matrix in self.matrices])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of these numbers, all of one dimension."""
        of = np.searchsorted(self._ends, numbers, side="right")
        found = np.zeros(
            (len(numbers), self.matrices[of[0]].shape[1] if len(of) else 1), np.float32
        )
        for run in np.unique(of):
            found[of == run] = self.matrices[run][
                numbers[of == run] - (self._ends[run] - len(self.matrices[run]))
            ]
        return found


class InNumPy(Functions):
    """The references."""

    xp = np

    def upload(self, values: np.ndarray) -> Any:
        return np.array(values)

    def download(self, array: Any) -> np.ndarray:
        return np.array(array)

    def rows(self, arrays: Sequence[Any]) -> Runs:
        return Runs(arrays)

    def flat(self, buffer: Any, lengths: np.ndarray, dims: np.ndarray) -> Runs:
        return Runs(np.split(buffer, np.cumsum(lengths * dims)[:-1]), dims)

    def distinct(self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int) -> Distinct:
        return np_distinct.distinct(keys, segments, kinds, ranks)

    def partition(
        self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int
    ) -> Partition:
        return np_partition.partition(keys, segments, kinds, ranks)

    def local_rows(self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int) -> Any:
        return np_partition.local_rows(keys, segments, kinds, ranks)

    def gather(self, tables: Sequence[Any], rows: Any, segments: Segments) -> Any:
        return np_gather.gather(tables, rows, segments, FLOAT32, FLOAT32)

    def pool(self, lookups: Sequence[Lookup], rows: Sequence[Any], ids: Ids) -> Any:
        made = np_pool.pool(lookups, rows, ids, FLOAT32)
        return (
            np.concatenate([one.reshape(-1) for one in made]) if made else np.zeros(0, np.float32)
        )

    def pool_terms(
        self,
        lookups: Sequence[Lookup],
        rows: Sequence[Any],
        ids: Ids,
        gradients: Any,
        of_weights: bool = False,
    ) -> Terms:
        return np_pool.pool_terms(lookups, rows, ids, gradients.matrices, of_weights=of_weights)

    def occurrences(self, numbers: Any, rows: int) -> Occurrences:
        return np_occurrences.occurrences(numbers, rows)

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
        return np_sums.sum_rows(
            gradients.matrices,
            occurrences,
            segments,
            dims,
            FLOAT32,
            None,
            terms,
            scale,
            along,
            None if own is None else own.matrices,
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
        np_update.update(rule, tables, rows, segments, gradients.matrices, occurrences)

    def hash_table(self, name: str, most_rows: int) -> np_hash_table.HashTable:
        return np_hash_table.HashTable(name, most_rows=most_rows)

    def find(self, tables: Sequence[Any], keys: Any, segments: Segments) -> Any:
        return np_hash_table.find(tables, keys, segments)

    def find_or_insert(self, tables: Sequence[Any], keys: Any, segments: Segments) -> Inserted:
        return np_hash_table.find_or_insert(tables, keys, segments, 0)
