"""Answers a message as the owner of rows, and makes the gradients of that.

    rows of tables ──gather──► flat ══rows══► the rank that asked
    reduced rows ◄──reduce── flat ◄══gradients══

`collective.ops.embedding_bag.gather` and its gradients are these. Each is one or two of the
kernels; `flat` is laid out as `message_layout.py` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.kernel_api import Joined, Kernels
from collective.ops.gpu.message_layout import Layout, read_runs
from collective.ops.gpu.pool import SUM, Ids, Lookup
from collective.ops.gpu.segments import STATIC, Segments


class Response:
    """Answers one message.

    Args:
        tables: T times [V, D] float32.
        rows: T times [R] int64, of what `requests.receive` returned.
        message, splits: what was received.
    """

    def __init__(
        self,
        kernels: Kernels,
        layout: Layout,
        tables: Sequence[Any],
        rows: Sequence[Any],
        message: Any,
        splits: np.ndarray,
    ):
        self._kernels, self._tables = kernels, tables
        self._runs = runs = read_runs(kernels, layout, message, splits)
        self._table_of = layout.by_run(layout.tables)
        self._dims = layout.by_run(layout.dims)
        order = np.argsort(self._table_of, kind="stable")
        starts = np.empty_like(runs.keys)
        starts[order] = np.cumsum(runs.keys[order]) - runs.keys[order]
        self._starts_by_table = starts  # where each run's keys are, ordered by table
        self._rows = kernels.xp.concatenate(list(rows))[kernels.spans(starts, runs.keys)]
        self._lookups, self._ids = None, Ids(self._rows, None)
        if any(layout.pooled):
            self._lookups = self._lookups_by_run(layout)
            self._ids = self._bags(message)

    def _lookups_by_run(self, layout: Layout) -> list[Lookup]:
        """Describes each run as a look-up of its bags in its table."""
        runs = self._runs
        norms = layout.by_run(layout.max_norms or [0.0] * len(layout.dims))
        fields = zip(runs.bags, self._dims, runs.weighted, norms, self._table_of)
        return [
            Lookup(int(bags), int(dim), SUM, bool(weighted), float(norm), int(table))
            for bags, dim, weighted, norm, table in fields
        ]

    def _bags(self, message: Any) -> Ids:
        """Reads the bags of pooled runs and their weights; each key of another run is a bag."""
        kernels, runs, xp = self._kernels, self._runs, self._kernels.xp
        lengths = xp.ones(int(runs.bags.sum()), np.int32)
        pooled = runs.bags_of(kernels, runs.pooled)
        lengths[pooled] = message.view(np.int32)[runs.lengths_in(kernels)]
        offsets = xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(lengths, dtype=np.int32)])
        ends = kernels.download(offsets[kernels.upload(runs.first_bag + runs.bags)])
        if np.any(ends != runs.first_key + runs.keys) or bool((lengths < 1).any()):
            raise ValueError(
                "a malformed message: the lengths of its bags are not those of its keys"
            )
        weights = None
        if runs.weighted.any():
            weights = xp.ones(int(runs.keys.sum()), np.float32)
            weighted = runs.keys_of(kernels, runs.weighted)
            weights[weighted] = message.view(np.float32)[runs.weights_in(kernels)]
        return Ids(self._rows, offsets, weights)

    def _rows_by_table(self) -> list[Any]:
        return [self._kernels.rows([table]) for table in self._tables]

    def gather(self) -> Any:
        """Gathers [E] float32: for each run one row a bag, of sections of which some are pooled."""
        assert self._lookups is not None
        return self._kernels.pool(self._lookups, self._rows_by_table(), self._ids)

    def reduce(self, gradient: Any, scale: float) -> tuple[Joined, Joined, Joined]:
        """Sums the gradients of each distinct row: for each table values [U, D], indices [U],
        inverse [R].
        """
        kernels, runs, tables = self._kernels, self._runs, len(self._tables)
        by_run = runs.segments(self._table_of)
        distinct = kernels.distinct(self._rows, by_run, [STATIC] * tables, 1)
        counts = kernels.download(distinct.counts).astype(np.int64).reshape(-1)
        total = int(counts.sum())
        rows, inverse = distinct.keys[:total].copy(), distinct.inverse.copy()
        segments = Segments.of(counts, range(tables))
        sums = self._sums(gradient, scale, rows, inverse, segments)
        dims = [int(table.shape[1]) for table in self._tables]
        keys_by_table = runs.counts_by(self._table_of, tables)
        return (
            Joined(sums, (counts * dims).tolist(), dims),
            Joined(rows, counts.tolist()),
            Joined(self._inverse_by_table(inverse, counts, keys_by_table), keys_by_table),
        )

    def _sums(
        self, gradient: Any, scale: float, rows: Any, inverse: Any, segments: Segments
    ) -> Any:
        """Sums the gradients of the distinct `rows`, one row after the other."""
        kernels = self._kernels
        dims = [int(table.shape[1]) for table in self._tables]
        gradients = kernels.flat(gradient, self._runs.bags, self._dims)
        terms = along = own = None
        if self._lookups is not None:
            made = kernels.pool_terms(self._lookups, self._rows_by_table(), self._ids, gradients)
            terms, along = made.terms, made.along
        if along is not None:
            flat = kernels.gather(self._tables, rows, segments)
            own = kernels.flat(flat, np.diff(segments.offsets), np.array(dims))
        occurrences = kernels.occurrences(inverse, segments.keys)
        return kernels.sum_rows(gradients, occurrences, segments, dims, terms, scale, along, own)

    def _inverse_by_table(
        self, inverse: Any, counts: np.ndarray, keys_by_table: Sequence[int]
    ) -> Any:
        """Orders the inverse index by table, and numbers the distinct rows of each table from 0
        on.
        """
        kernels, xp = self._kernels, self._kernels.xp
        ordered = inverse[self._runs.keys_by(kernels, self._table_of)]
        firsts = kernels.upload((np.cumsum(counts) - counts).astype(np.int32))
        ends = kernels.upload(np.cumsum(keys_by_table))
        at = xp.arange(int(sum(keys_by_table)), dtype=np.int64)
        return ordered - firsts[xp.searchsorted(ends, at, side="right")]

    def spread(self, values: Sequence[Any], inverse: Sequence[Any], scale: float) -> Any:
        """Transposes `reduce`: [E] float32."""
        kernels, runs = self._kernels, self._runs
        by_run = kernels.spans(self._starts_by_table, runs.keys)
        places = kernels.xp.concatenate(list(inverse))[by_run]
        lookups, ids = self._lookups, self._ids._replace(positions=places)
        if lookups is None:
            lookups = [
                Lookup(int(bags), int(dim), source=int(table))
                for bags, dim, table in zip(runs.bags, self._dims, self._table_of)
            ]
            ids = Ids(places, kernels.xp.arange(int(runs.keys.sum()) + 1, dtype=np.int32))
        lookups = [dataclasses.replace(lookup, max_norm=0.0) for lookup in lookups]
        rows = [kernels.rows([matrix]) for matrix in values]
        return kernels.pool(lookups, rows, ids) * np.float32(scale)
