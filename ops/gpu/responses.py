"""Answers a message as the owner of rows, and makes the gradients of that.

    rows of tables ──gather──► flat ══rows══► the rank that asked
    reduced rows ◄──reduce── flat ◄══gradients══

`collective.ops.bags.gather` and its gradients are these. Each is one or two of the kernels; `flat`
is laid out as `message_layout.py` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.kernel_api import Joined, Kernels
from collective.ops.gpu.message_layout import Layout, read
from collective.ops.gpu.pool import SUM, Ids, Lookup
from collective.ops.gpu.segments import STATIC, Segments


class Response:
    """Answers one message.

    Args:
        tables: T times [V, D] float32.
        rows: T times [R] int64, of what `requests.hear` returned.
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
        self._runs = runs = read(kernels, layout, message, splits)
        self._table_of = layout.by_run(layout.tables)
        self._dims = layout.by_run(layout.dims)
        order = np.argsort(self._table_of, kind="stable")
        starts = np.empty_like(runs.keys)
        starts[order] = np.cumsum(runs.keys[order]) - runs.keys[order]
        self._by_table = starts  # where each run's keys are, ordered by table
        self._rows = kernels.xp.concatenate(list(rows))[kernels.spans(starts, runs.keys)]
        self._lookups, self._ids = None, Ids(self._rows, None)
        if any(layout.pooled):
            norms = layout.by_run(layout.max_norms or [0.0] * len(layout.dims))
            of = zip(runs.bags, self._dims, runs.weighted, norms, self._table_of)
            self._lookups = [
                Lookup(int(bags), int(dim), SUM, bool(weighted), float(norm), int(table))
                for bags, dim, weighted, norm, table in of
            ]
            self._ids = self._bags(message)

    def _bags(self, message: Any) -> Ids:
        kernels, runs = self._kernels, self._runs
        lengths = kernels.xp.ones(int(runs.bags.sum()), np.int32)
        lengths[runs.bags_of(kernels, runs.pooled)] = message.view(np.int32)[
            runs.lengths_in(kernels)
        ]
        offsets = kernels.xp.concatenate(
            [kernels.xp.zeros(1, np.int32), kernels.xp.cumsum(lengths, dtype=np.int32)]
        )
        ends = kernels.download(offsets[kernels.upload(runs.first_bag + runs.bags)])
        if np.any(ends != runs.first_key + runs.keys) or bool((lengths < 1).any()):
            raise ValueError(
                "a malformed message: the lengths of its bags are not those of its keys"
            )
        weights = None
        if runs.weighted.any():
            weights = kernels.xp.ones(int(runs.keys.sum()), np.float32)
            weights[runs.keys_of(kernels, runs.weighted)] = message.view(np.float32)[
                runs.weights_in(kernels)
            ]
        return Ids(self._rows, offsets, weights)

    def gather(self) -> Any:
        """Gathers [E] float32: for each run one row a bag."""
        kernels = self._kernels
        if self._lookups is None:
            return kernels.gather(self._tables, self._rows, self._runs.segments(self._table_of))
        return kernels.pool(
            self._lookups, [kernels.rows([table]) for table in self._tables], self._ids
        )

    def reduce(self, gradient: Any, scale: float) -> tuple[Joined, Joined, Joined]:
        """Sums the gradients of each distinct row: for each table values [U, D], indices [U],
        inverse [R].
        """
        kernels, runs = self._kernels, self._runs
        tables = range(len(self._tables))
        found = kernels.distinct(
            self._rows, runs.segments(self._table_of), [STATIC] * len(self._tables), 1
        )
        counts = kernels.download(found.counts).astype(np.int64).reshape(-1)
        ends, total = np.cumsum(counts), int(counts.sum())
        rows, inverse, dims = (
            found.keys[:total].copy(),
            found.inverse.copy(),
            [int(t.shape[1]) for t in self._tables],
        )
        gradients = kernels.flat(gradient, runs.bags, self._dims)
        terms = along = own = None
        if self._lookups is not None:
            made = kernels.pool_terms(
                self._lookups,
                [kernels.rows([table]) for table in self._tables],
                self._ids,
                gradients,
            )
            terms, along = made.terms, made.along
        segments = Segments.of(counts, list(tables))
        if along is not None:
            own = kernels.flat(kernels.gather(self._tables, rows, segments), counts, np.array(dims))
        sums = kernels.sum_rows(
            gradients, kernels.occurrences(inverse, total), segments, dims, terms, scale, along, own
        )
        sizes_by = runs.counts_by(self._table_of, len(self._tables))
        places = inverse[runs.keys_by(kernels, self._table_of)]
        firsts = kernels.upload((ends - counts).astype(np.int32))
        table = kernels.xp.searchsorted(
            kernels.upload(np.cumsum(sizes_by)),
            kernels.xp.arange(int(sum(sizes_by)), dtype=np.int64),
            side="right",
        )
        return (
            Joined(sums, (counts * dims).tolist(), dims),
            Joined(rows, counts.tolist()),
            Joined(places - firsts[table], sizes_by),
        )

    def spread(self, values: Sequence[Any], inverse: Sequence[Any], scale: float) -> Any:
        """Transposes `reduce`: [E] float32."""
        kernels, runs = self._kernels, self._runs
        places = kernels.xp.concatenate(list(inverse))[kernels.spans(self._by_table, runs.keys)]
        lookups, ids = self._lookups, self._ids._replace(positions=places)
        if lookups is None:
            lookups = [
                Lookup(int(bags), int(dim), source=int(table))
                for bags, dim, table in zip(runs.bags, self._dims, self._table_of)
            ]
            ids = Ids(places, kernels.xp.arange(int(runs.keys.sum()) + 1, dtype=np.int32))
        lookups = [dataclasses.replace(lookup, max_norm=0.0) for lookup in lookups]
        return kernels.pool(lookups, [kernels.rows([one]) for one in values], ids) * np.float32(
            scale
        )
