"""Makes the requests of a rank with a GPU, and reads them on the owner.

These are `collective.ops.embedding_bag.request` and `respond`.

    ids ──► distinct (unpooled sections), partition (pooled ones) ──► message ══keys══►
    ══keys══► local rows, by table
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.kernel_api import Joined, Kernels
from collective.ops.gpu.message_layout import Layout, Runs, read_runs
from collective.ops.gpu.pool import MEAN, SUM, Ids, Lookup
from collective.ops.gpu.segments import Segments


class Request(NamedTuple):
    """Holds a rank's request: see `collective.ops.embedding_bag.Request`.

    Attributes:
        message: [X] int64.
        runs: what it asks for.
        positions: for each member that isn't pooled, then for each that is, int32: rows of `flat`,
            numbered through.
        samples, scales: for each pooled member [B] int64 and float32.
    """

    message: Any
    runs: Runs
    positions: list[Joined | Any]
    samples: list[Any]
    scales: list[Any]


class _PooledKeys(NamedTuple):
    """Holds the pooled members' keys, ordered by owner, then section.

    Attributes:
        keys, weights: [K] int64, float32 (None if no section is weighted).
        lengths: [B] int32.
        counts: [N, S], how many keys.
        bags: [N, S], how many bags.
        positions, samples, scales: for each member, the bags of each sample: which, of which
            sample, times what.
    """

    keys: Any
    weights: Any
    lengths: Any
    counts: np.ndarray
    bags: np.ndarray
    positions: list[Any]
    samples: list[Any]
    scales: list[Any]


def ask(
    kernels: Kernels,
    layout: Layout,
    sections: Sequence[int],
    combiners: Sequence[int],
    ids: Sequence[Any],
    samples: Sequence[Any],
    weights: Sequence[Any],
) -> Request:
    """De-duplicates keys by section, orders them by owner, and says where their rows will be found.

    Args:
        layout: of the exchange.
        sections, combiners: of M members.
        ids: for each member [K] int64.
        samples: for each pooled member [K] int64, ascending.
        weights: for each weighted pooled member [K] float32.
    """
    is_pooled = np.asarray(layout.pooled, bool)
    plain = [m for m, section in enumerate(sections) if not is_pooled[section]]
    pooled = [m for m, section in enumerate(sections) if is_pooled[section]]
    distinct = kernels.distinct(
        _joined(kernels, [ids[m] for m in plain], np.int64),
        Segments.of([ids[m].size for m in plain], [sections[m] for m in plain]),
        layout.section_kinds,
        layout.ranks,
    )
    counts = kernels.download(distinct.counts).astype(np.int64)
    pooled_keys = _pooled_keys(
        kernels,
        layout,
        [sections[m] for m in pooled],
        [combiners[m] for m in pooled],
        [ids[m] for m in pooled],
        samples,
        weights,
    )
    runs = Runs(layout, counts + pooled_keys.bags, counts + pooled_keys.counts)
    message = _message(kernels, layout, runs, distinct.keys[: int(counts.sum())], pooled_keys)
    places = _numbered(kernels, distinct.inverse, counts, runs.first_bag)
    positions = [
        Joined(places, [int(ids[m].size) for m in plain]),
        *(
            _numbered(kernels, bags, pooled_keys.bags, runs.first_bag)
            for bags in pooled_keys.positions
        ),
    ]
    return Request(message, runs, positions, pooled_keys.samples, pooled_keys.scales)


def _message(
    kernels: Kernels, layout: Layout, runs: Runs, plain_keys: Any, pooled: _PooledKeys
) -> Any:
    """Writes the [X] int64 words of a request."""
    keys = kernels.xp.empty(int(runs.keys.sum()), np.int64)
    keys[runs.keys_of(kernels, ~runs.pooled)] = plain_keys
    keys[runs.keys_of(kernels, runs.pooled)] = pooled.keys
    message = kernels.xp.zeros(int(runs.splits.sum()), np.int64)
    headers = np.stack([runs.bags, runs.keys], 1).reshape(layout.ranks, -1)
    begins = np.cumsum(runs.splits) - runs.splits
    words = kernels.spans(begins, np.full(layout.ranks, headers.shape[1]))
    message[words] = kernels.upload(headers.reshape(-1))
    message[runs.keys_in(kernels)] = keys
    message.view(np.int32)[runs.lengths_in(kernels)] = pooled.lengths
    if pooled.weights is not None:
        counts = pooled.counts.reshape(-1)
        weighted = kernels.spans(np.cumsum(counts) - counts, np.where(runs.weighted, counts, 0))
        message.view(np.float32)[runs.weights_in(kernels)] = pooled.weights[weighted]
    return message


def receive(
    kernels: Kernels, layout: Layout, message: Any, splits: np.ndarray
) -> tuple[Joined, np.ndarray]:
    """Reads a received message: for each table [R] int64 the local rows, or keys of a dynamic one,
    in the order of the runs; and [N] `row_splits`.
    """
    runs = read_runs(kernels, layout, message, splits)
    rows = kernels.local_rows(
        message[runs.keys_in(kernels)],
        runs.segments(np.tile(np.arange(len(layout.tables)), layout.ranks)),
        layout.section_kinds,
        layout.ranks,
    )
    tables = layout.by_run(layout.tables)
    rows_by_table = rows[runs.keys_by(kernels, tables)]
    return Joined(rows_by_table, runs.counts_by(tables, len(layout.kinds))), runs.row_splits


def _pooled_keys(
    kernels: Kernels,
    layout: Layout,
    sections: Sequence[int],
    combiners: Sequence[int],
    ids: Sequence[Any],
    samples: Sequence[Any],
    weights: Sequence[Any],
) -> _PooledKeys:
    shape, xp = (layout.ranks, len(layout.tables)), kernels.xp
    sizes = np.array([x.size for x in ids], np.int64)
    size = int(sizes.sum())
    if size == 0:
        return _PooledKeys(
            xp.zeros(0, np.int64),
            None,
            xp.zeros(0, np.int32),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            [xp.zeros(0, np.int32) for _ in ids],
            [xp.zeros(0, np.int64) for _ in ids],
            [xp.zeros(0, np.float32) for _ in ids],
        )
    segments = Segments.of(sizes, sections)
    all_ids = _joined(kernels, ids, np.int64)
    parts = kernels.partition(all_ids, segments, layout.section_kinds, layout.ranks)
    counts = kernels.download(parts.counts).astype(np.int64)
    places, sample_of = parts.positions.astype(np.int64), _joined(kernels, samples, np.int64)
    ordered_samples = xp.empty(size, np.int64)
    ordered_samples[places] = sample_of
    run_counts = counts.reshape(-1)
    starts = np.cumsum(run_counts) - run_counts
    begins_bag = xp.ones(size, bool)
    begins_bag[1:] = ordered_samples[1:] != ordered_samples[:-1]
    begins_bag[kernels.upload(starts[run_counts > 0])] = True
    bags_until = xp.cumsum(begins_bag, dtype=np.int32)  # each key's own bag is one of them
    begins = xp.nonzero(begins_bag)[0]
    ends = xp.full(1, size, begins.dtype)
    lengths = xp.diff(xp.concatenate([begins, ends])).astype(np.int32)
    bags = _bags_by_run(kernels, bags_until, starts + run_counts)
    all_weights = _joined_weights(kernels, layout, sections, sizes, weights)
    ordered_weights = None
    if all_weights is not None:
        ordered_weights = xp.empty(size, np.float32)
        ordered_weights[places] = all_weights
    is_first = begins_bag[places]
    positions, bag_samples, scales = [], [], []
    for end, count, combiner in zip(np.cumsum(sizes), sizes, combiners):
        part = slice(int(end - count), int(end))
        firsts = xp.nonzero(is_first[part])[0]
        member_weights = None if all_weights is None else all_weights[part]
        scale = _scales(kernels, combiner, sample_of[part], member_weights)
        positions.append((bags_until[places[part][firsts]] - 1).astype(np.int32))
        bag_samples.append(sample_of[part][firsts])
        scales.append(scale[firsts])
    return _PooledKeys(
        parts.keys,
        ordered_weights,
        lengths,
        counts,
        bags.reshape(shape),
        positions,
        bag_samples,
        scales,
    )


def _bags_by_run(kernels: Kernels, bags_until: Any, ends: np.ndarray) -> np.ndarray:
    """Counts the bags of each run, [N·S], by how many there are until each key and by the `ends` of
    the runs among the keys.
    """
    lasts = kernels.download(bags_until[kernels.upload(np.maximum(ends - 1, 0))])
    until = np.concatenate([[0], np.where(ends > 0, lasts, 0)])
    return np.diff(np.maximum.accumulate(until))


def _joined_weights(
    kernels: Kernels,
    layout: Layout,
    sections: Sequence[int],
    sizes: np.ndarray,
    weights: Sequence[Any],
) -> Any:
    """Joins the weights of pooled members, [K] float32, 1 for members without; None if no member
    has any.
    """
    if not weights:
        return None
    remaining = iter(weights)
    by_member = [
        next(remaining) if layout.weighted[section] else kernels.xp.ones(int(size), np.float32)
        for section, size in zip(sections, sizes)
    ]
    return _joined(kernels, by_member, np.float32)


def _scales(kernels: Kernels, combiner: int, samples: Any, weights: Any) -> Any:
    """Returns [K] float32, the factors of the sums of each id's sample."""
    xp, size = kernels.xp, int(samples.size)
    if combiner == SUM or size == 0:
        return xp.ones(size, np.float32)
    is_first = xp.ones(size, bool)
    is_first[1:] = samples[1:] != samples[:-1]
    number, begins = xp.cumsum(is_first) - 1, xp.nonzero(is_first)[0]
    offsets = xp.concatenate([begins, xp.full(1, size, begins.dtype)]).astype(np.int32)
    if weights is None:
        totals = xp.diff(offsets).astype(np.float32)
    else:
        terms = weights if combiner == MEAN else weights * weights
        totals = kernels.pool(
            [Lookup(int(begins.size), 1)],
            [kernels.rows([terms.reshape(-1, 1)])],
            Ids(xp.arange(size, dtype=np.int32), offsets),
        )
    if combiner != MEAN:
        totals = xp.sqrt(totals)
    factors = xp.where(totals == 0, 0, 1 / xp.where(totals == 0, 1, totals))
    return factors.astype(np.float32)[number]


def _numbered(kernels: Kernels, numbers: Any, counts: np.ndarray, firsts: np.ndarray) -> Any:
    """Renumbers int32 `numbers` within runs of `counts`, one after the other, as the rows from
    `firsts` [N·S] on.
    """
    lengths = counts.reshape(-1)
    kept = lengths > 0
    ends = np.cumsum(lengths[kept])
    shifts = (firsts[kept] - (ends - lengths[kept])).astype(np.int32)
    if not np.any(shifts):
        return numbers
    run = kernels.xp.searchsorted(kernels.upload(ends.astype(np.int32)), numbers, side="right")
    return numbers + kernels.upload(shifts)[run]


def _joined(kernels: Kernels, arrays: Sequence[Any], dtype: Any) -> Any:
    return kernels.xp.concatenate(list(arrays)) if arrays else kernels.xp.zeros(0, dtype)
