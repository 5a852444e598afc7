"""Computes the kernels' functions by NumPy's references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu import kernel_api
from collective.ops.gpu.distinct import Distinct
from collective.ops.gpu.hash_table import Inserted
from collective.ops.gpu.occurrences import Occurrences
from collective.ops.gpu.partition import Partition
from collective.ops.gpu.pool import Ids, Lookup, Terms
from collective.ops.gpu.reference import (
    distinct,
    gather,
    hash_table,
    occurrences,
    partition,
    pool,
    sums,
    update,
)
from collective.ops.gpu.rules import Rule
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.update import Table


class Matrices:
    """Numbers the rows of matrices through: what the references take in the place of `Rows`."""

    def __init__(
        self, matrices: Sequence[np.ndarray], dims: Sequence[int] | np.ndarray | None = None
    ):
        self.matrices = list(matrices)
        if dims is not None:
            self.matrices = [one.reshape(-1, dim) for one, dim in zip(matrices, dims)]
        self._ends = np.cumsum([len(matrix) for matrix in self.matrices])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the rows of these numbers, all of one dimension."""
        matrix_of = np.searchsorted(self._ends, numbers, side="right")
        dim = self.matrices[matrix_of[0]].shape[1] if len(matrix_of) else 1
        found = np.zeros((len(numbers), dim), np.float32)
        for m in np.unique(matrix_of):
            matrix, inside = self.matrices[m], matrix_of == m
            found[inside] = matrix[numbers[inside] - (self._ends[m] - len(matrix))]
        return found


class NumpyKernels(kernel_api.Kernels):
    """Computes by the references."""

    xp = np

    def __init__(self) -> None:
        pass  # neither a workspace nor a device

    def upload(self, values: np.ndarray) -> Any:
        return np.array(values)

    def download(self, array: Any) -> np.ndarray:
        return np.array(array)

    def rows(self, arrays: Sequence[Any]) -> Matrices:
        return Matrices(arrays)

    def flat(self, buffer: Any, lengths: np.ndarray, dims: np.ndarray) -> Matrices:
        return Matrices(np.split(buffer, np.cumsum(lengths * dims)[:-1]), dims)

    def distinct(self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int) -> Distinct:
        return distinct.distinct(keys, segments, kinds, ranks)

    def partition(
        self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int
    ) -> Partition:
        return partition.partition(keys, segments, kinds, ranks)

    def local_rows(self, keys: Any, segments: Segments, kinds: Sequence[int], ranks: int) -> Any:
        return partition.local_rows(keys, segments, kinds, ranks)

    def gather(self, tables: Sequence[Any], rows: Any, segments: Segments) -> Any:
        return gather.gather(tables, rows, segments)

    def pool(self, lookups: Sequence[Lookup], rows: Sequence[Any], ids: Ids) -> Any:
        pooled = pool.pool(lookups, rows, ids)
        if not pooled:
            return np.zeros(0, np.float32)
        return np.concatenate([one.reshape(-1) for one in pooled])

    def pool_terms(
        self,
        lookups: Sequence[Lookup],
        rows: Sequence[Any],
        ids: Ids,
        gradients: Any,
        of_weights: bool = False,
    ) -> Terms:
        return pool.pool_terms(lookups, rows, ids, gradients.matrices, of_weights=of_weights)

    def occurrences(self, numbers: Any, rows: int) -> Occurrences:
        return occurrences.occurrences(numbers, rows)

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
        own_matrices = None if own is None else own.matrices
        return sums.sum_rows(
            gradients.matrices, occurrences, segments, dims, None, terms, scale, along, own_matrices
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
        update.update(rule, tables, rows, segments, gradients.matrices, occurrences)

    def hash_table(self, name: str, most_rows: int) -> hash_table.HashTable:
        return hash_table.HashTable(name, most_rows=most_rows)

    def find(self, tables: Sequence[Any], keys: Any, segments: Segments) -> Any:
        return hash_table.find(tables, keys, segments)

    def find_or_insert(
        self, tables: Sequence[Any], keys: Any, segments: Segments, steps: Sequence[int]
    ) -> Inserted:
        return hash_table.find_or_insert(tables, keys, segments, steps)

    def remove(self, table: Any, gone: np.ndarray, moved: np.ndarray, to: np.ndarray) -> None:
        hash_table.remove(table, gone, moved, to)

    def steps(self, table: Any) -> np.ndarray:
        return hash_table.steps(table)

    def set_steps(self, table: Any, keys: np.ndarray, steps: np.ndarray) -> None:
        hash_table.set_steps(table, keys, steps)
