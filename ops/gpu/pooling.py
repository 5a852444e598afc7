"""What an owner with a GPU answers, and what a rank makes of the rows that come back; and the
gradients of both.

    rows of tables ──gather──► flat ══rows══► flat ──pool──► one matrix a lookup
    collective.ops.embedding_bag.gather, pool reduced rows ◄──reduce── flat ══gradients══ flat
    ◄──pool_gradient── their gradients

Each of them is one or two of the kernels. `flat` is as `wire.py` says; positions number its rows
through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.functions import Functions, Joined
from collective.ops.gpu.pool import SUM, Ids, Lookup
from collective.ops.gpu.segments import STATIC, Segments
from collective.ops.gpu.wire import Layout, read

ROWS = 0  # no combiner, as in ops/bags.py


class Answering:
    """What an owner answers to one message.

    Args:
        tables: T times [V, D] float32.
        rows: T times [R] int64, of what `asking.hear` returned.
        message, splits: what was received.
    """

    def __init__(
        self,
        f: Functions,
        layout: Layout,
        tables: Sequence[Any],
        rows: Sequence[Any],
        message: Any,
        splits: np.ndarray,
    ):
        self._f, self._tables = f, tables
        self._runs = runs = read(f, layout, message, splits)
        self._table_of = layout.by_run(layout.tables)
        self._dims = layout.by_run(layout.dims)
        order = np.argsort(self._table_of, kind="stable")
        starts = np.empty_like(runs.keys)
        starts[order] = np.cumsum(runs.keys[order]) - runs.keys[order]
        self._by_table = starts  # where each run's keys are, ordered by table
        self._rows = f.xp.concatenate(list(rows))[f.spans(starts, runs.keys)]
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
        f, runs = self._f, self._runs
        lengths = f.xp.ones(int(runs.bags.sum()), np.int32)
        lengths[runs.bags_of(f, runs.pooled)] = message.view(np.int32)[runs.lengths_in(f)]
        offsets = f.xp.concatenate([f.xp.zeros(1, np.int32), f.xp.cumsum(lengths, dtype=np.int32)])
        ends = f.download(offsets[f.upload(runs.first_bag + runs.bags)])
        if np.any(ends != runs.first_key + runs.keys) or bool((lengths < 1).any()):
            raise ValueError(
                "a malformed message: the lengths of its bags are not those of its keys"
            )
        weights = None
        if runs.weighted.any():
            weights = f.xp.ones(int(runs.keys.sum()), np.float32)
            weights[runs.keys_of(f, runs.weighted)] = message.view(np.float32)[runs.weights_in(f)]
        return Ids(self._rows, offsets, weights)

    def gather(self) -> Any:
        """[E] float32: for each run one row a bag."""
        f = self._f
        if self._lookups is None:
            return f.gather(self._tables, self._rows, self._runs.segments(self._table_of))
        return f.pool(self._lookups, [f.rows([table]) for table in self._tables], self._ids)

    def reduce(self, gradient: Any, scale: float) -> tuple[Joined, Joined, Joined]:
        """For each table values [U, D], indices [U], inverse [R]: the sums of what each distinct
        row's gradient is.
        """
        f, runs = self._f, self._runs
        tables = range(len(self._tables))
        found = f.distinct(
            self._rows, runs.segments(self._table_of), [STATIC] * len(self._tables), 1
        )
        counts = f.download(found.counts).astype(np.int64).reshape(-1)
        ends, total = np.cumsum(counts), int(counts.sum())
        rows, inverse, dims = (
            found.keys[:total].copy(),
            found.inverse.copy(),
            [int(t.shape[1]) for t in self._tables],
        )
        gradients = f.flat(gradient, runs.bags, self._dims)
        terms = along = own = None
        if self._lookups is not None:
            made = f.pool_terms(
                self._lookups, [f.rows([table]) for table in self._tables], self._ids, gradients
            )
            terms, along = made.terms, made.along
        segments = Segments.of(counts, list(tables))
        if along is not None:
            own = f.flat(f.gather(self._tables, rows, segments), counts, np.array(dims))
        sums = f.sum_rows(
            gradients, f.occurrences(inverse, total), segments, dims, terms, scale, along, own
        )
        sizes_by = runs.counts_by(self._table_of, len(self._tables))
        places = inverse[runs.keys_by(f, self._table_of)]
        firsts = f.upload((ends - counts).astype(np.int32))
        table = f.xp.searchsorted(
            f.upload(np.cumsum(sizes_by)),
            f.xp.arange(int(sum(sizes_by)), dtype=np.int64),
            side="right",
        )
        return (
            Joined(sums, (counts * dims).tolist(), dims),
            Joined(rows, counts.tolist()),
            Joined(places - firsts[table], sizes_by),
        )

    def spread(self, values: Sequence[Any], inverse: Sequence[Any], scale: float) -> Any:
        """The transposed of `reduce`: [E] float32."""
        f, runs = self._f, self._runs
        places = f.xp.concatenate(list(inverse))[f.spans(self._by_table, runs.keys)]
        lookups, ids = self._lookups, self._ids._replace(positions=places)
        if lookups is None:
            lookups = [
                Lookup(int(bags), int(dim), source=int(table))
                for bags, dim, table in zip(runs.bags, self._dims, self._table_of)
            ]
            ids = Ids(places, f.xp.arange(int(runs.keys.sum()) + 1, dtype=np.int32))
        lookups = [dataclasses.replace(lookup, max_norm=0.0) for lookup in lookups]
        return f.pool(lookups, [f.rows([one]) for one in values], ids) * np.float32(scale)


class Members(NamedTuple):
    """M lookups: see `collective.ops.embedding_bag.BagMember`."""

    sections: Sequence[int]
    dims: Sequence[int]
    combiners: Sequence[int]
    weighted: Sequence[bool]
    max_norms: Sequence[float]


class Pooling:
    """What some of the lookups make of the rows that came back.

    Args:
        members: all M lookups.
        flat: [E] float32.
        counts: [N, S], how many bags of each section came from each rank.
        positions: for each member int32.
        samples: for each member with a combiner int64, ascending.
        weights: for each weighted member float32.
        of: the members that are wanted.
    """

    def __init__(
        self,
        f: Functions,
        members: Members,
        flat: Any,
        counts: np.ndarray,
        positions: Sequence[Any],
        samples: Sequence[Any],
        weights: Sequence[Any],
        of: Sequence[int],
    ):
        self._f, self._of, self._weighted = f, of, members.weighted
        self._weights, self._positions = list(weights), positions
        dims = np.ones(counts.shape[1], np.int64)
        dims[list(members.sections)] = members.dims
        self._counts, self._dims = counts.astype(np.int64), dims
        self._rows = f.flat(flat, self._counts.reshape(-1), np.tile(dims, len(counts)))
        of_samples, of_weights = iter(samples), iter(weights)
        by_sample = [
            next(of_samples) if combiner != ROWS else None for combiner in members.combiners
        ]
        by_weight = [next(of_weights) if weighted else None for weighted in members.weighted]
        sizes = [int(positions[m].size) for m in of]
        self._ends = np.cumsum(sizes)
        batches = self._batches([by_sample[m] for m in of], sizes)
        self.lookups = [
            Lookup(
                batch,
                members.dims[m],
                max(members.combiners[m], SUM),
                members.weighted[m],
                max(members.max_norms[m], 0.0),
            )
            for m, batch in zip(of, batches)
        ]
        joined = None
        if any(members.weighted[m] for m in of):
            joined = f.xp.concatenate(
                [
                    f.xp.ones(size, np.float32) if by_weight[m] is None else by_weight[m]
                    for m, size in zip(of, sizes)
                ]
            )
        self._ids = Ids(
            f.xp.concatenate([positions[m] for m in of]),
            self._offsets([by_sample[m] for m in of], sizes, batches),
            joined,
        )

    def _batches(self, samples: Sequence[Any], sizes: Sequence[int]) -> list[int]:
        """How many samples each member has."""
        known = [i for i, one in enumerate(samples) if one is not None and sizes[i]]
        batches = [size if one is None else 0 for one, size in zip(samples, sizes)]
        if known:
            lasts = self._f.download(self._f.xp.concatenate([samples[i][-1:] for i in known]))
            for i, last in zip(known, lasts):
                batches[i] = int(last) + 1
        return batches

    def _offsets(self, samples: Sequence[Any], sizes: Sequence[int], batches: Sequence[int]) -> Any:
        """[B + 1] int32, where the samples of all members begin."""
        f, total = self._f, int(sum(batches))
        if all(one is None for one in samples):
            return f.xp.arange(total + 1, dtype=np.int32)
        joined = f.xp.concatenate(
            [
                f.xp.arange(size, dtype=np.int64) if one is None else one
                for one, size in zip(samples, sizes)
            ]
        )
        at = f.xp.searchsorted(
            f.upload(self._ends), f.xp.arange(int(self._ends[-1]), dtype=np.int64), side="right"
        )
        joined = joined + f.upload(np.cumsum(batches) - np.asarray(batches, np.int64))[at]
        return f.offsets(joined, total)

    def pool(self) -> Joined:
        """[samples or ids, D] float32 for each member."""
        return Joined(
            self._f.pool(self.lookups, [self._rows], self._ids),
            [lookup.samples * lookup.dim for lookup in self.lookups],
            [lookup.dim for lookup in self.lookups],
        )

    def gradient(self, gradients: Sequence[Any]) -> tuple[Any, list[Any]]:
        """([E] of `flat`, for each weighted member that of its weights), by what the wanted
        members' results have.
        """
        f, total = self._f, int(self._counts.sum())
        lookup_gradients = f.rows(
            [
                one.reshape(lookup.samples, lookup.dim)
                for one, lookup in zip(gradients, self.lookups)
            ]
        )
        of_weights = any(self._weighted[m] for m in self._of)
        made = f.pool_terms(self.lookups, [self._rows], self._ids, lookup_gradients, of_weights)
        segments = Segments.of(
            self._counts.reshape(-1), np.tile(np.arange(len(self._dims)), len(self._counts))
        )
        flat = f.sum_rows(
            lookup_gradients,
            f.occurrences(self._ids.positions, total),
            segments,
            self._dims.tolist(),
            made.terms,
            1.0,
            made.along,
            self._rows,
        )
        by_member = {
            m: made.weights[int(end - self._positions[m].size) : int(end)]
            for m, end in zip(self._of, self._ends)
            if self._weighted[m]
        }
        weighted = [m for m, has in enumerate(self._weighted) if has]
        return flat, [
            by_member[m] if m in by_member else f.xp.zeros_like(given)
            for m, given in zip(weighted, self._weights)
        ]
