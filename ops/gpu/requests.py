"""Makes the requests of a rank with a GPU, and reads them on the owner.

These are `collective.ops.embedding_bag.request` and `respond`.

ids ──► distinct (unpooled sections), partition (pooled ones) ──► message ══keys══► local rows,
by table
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.kernel_api import Joined, Kernels
from collective.ops.gpu.message_layout import Layout, Runs, read
from collective.ops.gpu.pool import MEAN, SUM, Ids, Lookup
from collective.ops.gpu.segments import Segments


class Asked(NamedTuple):
    """See `collective.ops.embedding_bag.Request`.

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


class _Bags(NamedTuple):
    """The pooled members' keys, ordered by owner, then section.

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
) -> Asked:
    """De-duplicates keys by section, orders them by owner, and says where their rows will be found.

    Args:
        layout: of the exchange.
        sections, combiners: of M members.
        ids: for each member [K] int64.
        samples: for each pooled member [K] int64, ascending.
        weights: for each weighted pooled member [K] float32.
    """
    pooled = np.asarray(layout.pooled, bool)
    plain = [m for m, section in enumerate(sections) if not pooled[section]]
    others = [m for m, section in enumerate(sections) if pooled[section]]
    found = kernels.distinct(
        _joined(kernels, [ids[m] for m in plain], np.int64),
        Segments.of([ids[m].size for m in plain], [sections[m] for m in plain]),
        layout.section_kinds,
        layout.ranks,
    )
    counts = kernels.download(found.counts).astype(np.int64)
    bags = _bags(
        kernels,
        layout,
        [sections[m] for m in others],
        [combiners[m] for m in others],
        [ids[m] for m in others],
        samples,
        weights,
    )
    runs = Runs(layout, counts + bags.bags, counts + bags.counts)
    by_key = kernels.xp.empty(int(runs.keys.sum()), np.int64)
    by_key[runs.keys_of(kernels, ~runs.pooled)] = found.keys[: int(counts.sum())]
    by_key[runs.keys_of(kernels, runs.pooled)] = bags.keys
    message = kernels.xp.zeros(int(runs.splits.sum()), np.int64)
    headers = np.stack([runs.bags, runs.keys], 1).reshape(layout.ranks, -1)
    begins = np.cumsum(runs.splits) - runs.splits
    message[kernels.spans(begins, np.full(layout.ranks, headers.shape[1]))] = kernels.upload(
        headers.reshape(-1)
    )
    message[runs.keys_in(kernels)] = by_key
    message.view(np.int32)[runs.lengths_in(kernels)] = bags.lengths
    if bags.weights is not None:
        message.view(np.float32)[runs.weights_in(kernels)] = bags.weights[
            kernels.spans(
                np.cumsum(bags.counts.reshape(-1)) - bags.counts.reshape(-1),
                np.where(runs.weighted, bags.counts.reshape(-1), 0),
            )
        ]
    places = _numbered(kernels, found.inverse, counts, runs.first_bag)
    positions = [
        Joined(places, [int(ids[m].size) for m in plain]),
        *(_numbered(kernels, place, bags.bags, runs.first_bag) for place in bags.positions),
    ]
    return Asked(message, runs, positions, bags.samples, bags.scales)


def hear(
    kernels: Kernels, layout: Layout, message: Any, splits: np.ndarray
) -> tuple[Joined, np.ndarray]:
    """(for each table [R] int64 the local rows, or keys of a dynamic one, in the order of the runs;
    [N] `row_splits`).
    """
    runs = read(kernels, layout, message, splits)
    rows = kernels.local_rows(
        message[runs.keys_in(kernels)],
        runs.segments(np.tile(np.arange(len(layout.tables)), layout.ranks)),
        layout.section_kinds,
        layout.ranks,
    )
    tables = layout.by_run(layout.tables)
    return Joined(
        rows[runs.keys_by(kernels, tables)], runs.counts_by(tables, len(layout.kinds))
    ), runs.row_splits


def _bags(
    kernels: Kernels,
    layout: Layout,
    sections: Sequence[int],
    combiners: Sequence[int],
    ids: Sequence[Any],
    samples: Sequence[Any],
    weights: Sequence[Any],
) -> _Bags:
    shape, xp = (layout.ranks, len(layout.tables)), kernels.xp
    sizes = np.array([x.size for x in ids], np.int64)
    size = int(sizes.sum())
    if size == 0:
        none = [xp.zeros(0, np.int32) for _ in ids]
        return _Bags(
            xp.zeros(0, np.int64),
            None,
            xp.zeros(0, np.int32),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            none,
            [xp.zeros(0, np.int64) for _ in ids],
            [xp.zeros(0, np.float32) for _ in ids],
        )
    parts = kernels.partition(
        _joined(kernels, ids, np.int64),
        Segments.of(sizes, sections),
        layout.section_kinds,
        layout.ranks,
    )
    counts = kernels.download(parts.counts).astype(np.int64)
    places, of = parts.positions.astype(np.int64), _joined(kernels, samples, np.int64)
    ordered = xp.empty(size, np.int64)
    ordered[places] = of
    starts = np.cumsum(counts.reshape(-1)) - counts.reshape(-1)
    first = xp.ones(size, bool)  # of a bag
    first[1:] = ordered[1:] != ordered[:-1]
    first[kernels.upload(starts[counts.reshape(-1) > 0])] = True
    number = xp.cumsum(first, dtype=np.int32)  # of bags up to each key
    begins = xp.nonzero(first)[0]
    lengths = xp.diff(xp.concatenate([begins, xp.full(1, size, begins.dtype)])).astype(np.int32)
    upto = np.concatenate(
        [
            [0],
            kernels.download(
                number[kernels.upload(np.maximum(starts + counts.reshape(-1) - 1, 0))]
            ),
        ]
    )
    bags = np.diff(
        np.maximum.accumulate(
            np.where(np.concatenate([[True], starts + counts.reshape(-1) > 0]), upto, 0)
        )
    )
    given = _given_weights(kernels, layout, sections, sizes, weights)
    ordered_weights = None
    if given is not None:
        ordered_weights = xp.empty(size, np.float32)
        ordered_weights[places] = given
    kept = first[places]
    ends = np.cumsum(sizes)
    made: list[tuple[Any, Any, Any]] = []
    for m, (end, count) in enumerate(zip(ends, sizes)):
        part = slice(int(end - count), int(end))
        which = xp.nonzero(kept[part])[0]
        scale = _scales(kernels, combiners[m], of[part], None if given is None else given[part])
        made.append(
            ((number[places[part][which]] - 1).astype(np.int32), of[part][which], scale[which])
        )
    positions, bag_samples, scales = ([one[i] for one in made] for i in range(3))
    return _Bags(
        parts.keys,
        ordered_weights,
        lengths,
        counts,
        bags.reshape(shape),
        positions,
        bag_samples,
        scales,
    )


def _given_weights(
    kernels: Kernels,
    layout: Layout,
    sections: Sequence[int],
    sizes: np.ndarray,
    weights: Sequence[Any],
) -> Any:
    """[K] float32 of pooled members, 1 of those that have none; None if none has."""
    if not weights:
        return None
    left = iter(weights)
    return _joined(
        kernels,
        [
            next(left) if layout.weighted[section] else kernels.xp.ones(int(size), np.float32)
            for section, size in zip(sections, sizes)
        ],
        np.float32,
    )


def _scales(kernels: Kernels, combiner: int, samples: Any, weights: Any) -> Any:
    """[K] float32, what the sum of each id's sample is multiplied by."""
    xp, size = kernels.xp, int(samples.size)
    if combiner == SUM or size == 0:
        return xp.ones(size, np.float32)
    new = xp.ones(size, bool)
    new[1:] = samples[1:] != samples[:-1]
    number, begins = xp.cumsum(new) - 1, xp.nonzero(new)[0]
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
    return (xp.where(totals == 0, 0, 1 / xp.where(totals == 0, 1, totals)).astype(np.float32))[
        number
    ]


def _numbered(kernels: Kernels, numbers: Any, counts: np.ndarray, firsts: np.ndarray) -> Any:
    """int32 `numbers` within runs of `counts`, one after the other, as those of the rows from
    `firsts` [N·S] on.
    """
    lengths = counts.reshape(-1)[counts.reshape(-1) > 0]
    ends, kept = np.cumsum(lengths), firsts[counts.reshape(-1) > 0]
    shifts = (kept - (ends - lengths)).astype(np.int32)
    if not np.any(shifts):
        return numbers
    return (
        numbers
        + kernels.upload(shifts)[
            kernels.xp.searchsorted(kernels.upload(ends.astype(np.int32)), numbers, side="right")
        ]
    )


def _joined(kernels: Kernels, arrays: Sequence[Any], dtype: Any) -> Any:
    return kernels.xp.concatenate(list(arrays)) if arrays else kernels.xp.zeros(0, dtype)
