"""Pools look-ups: combines rows by sample, and computes their gradients.

The requester pools the rows that came back, by the inverse index; an owner that pools sums the rows
of its tables, by row number. The ids of all look-ups are concatenated, and so are the samples:
sample b has the ids offsets[b] to before offsets[b + 1]. An id whose row is needed without a
combiner is its own sample.

The gradient of rows is `sums.sum_rows` with the `terms` of `pool_terms`, or `update.update` with
them, which applies the gradient without writing it. `reference/pool.py` has the same functions in
NumPy.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.device import Device
from collective.ops.gpu.segments import THREADS
from collective.ops.gpu.sources import Source
from collective.ops.gpu.sums import NULL, Rows, group_lanes
from collective.ops.gpu.workspace import Workspace

SOURCE = Source(
    "pool.cu",
    (
        "pool_rows",
        "pool_rows_plain",
        "pool_products",
        "pool_terms",
        "pool_weights",
        "sample_offsets",
    ),
)
SUM, MEAN, SQRTN = range(1, 4)  # combiners, as in ops/exchange/embedding_bag.py
_IN_FLIGHT = 4  # samples per group, if they have several ids
_MANY = 4096 * THREADS  # from this many samples on, groups have more
_WIDTH, _FLOAT_BYTES = 4, 4  # elements of one access, and the bytes of one element
_ACCESS_BYTES = _WIDTH * _FLOAT_BYTES


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Describes one of M look-ups.

    Attributes:
        samples: B.
        dim: D.
        combiner: SUM; MEAN, divided by the sum of weights; SQRTN, divided by the root of the sum of
            their squares.
        weighted: whether each id has a weight; else weights are 1.
        max_norm: the L2 norm to which each row is clipped first; 0 for none.
        source: the number of the `Rows` with its rows.
    """

    samples: int
    dim: int
    combiner: int = SUM
    weighted: bool = False
    max_norm: float = 0.0
    source: int = 0


class Ids(NamedTuple):
    """Holds the K ids of M look-ups with B samples in all.

    Attributes:
        positions: [K] int32 or int64, the row of each id among its look-up's rows; a position
            outside of them means a row of zeros.
        offsets: [B + 1] int32, ascending from 0 to K, the first id of each sample.
        weights: [K] float32, or None if no look-up is weighted.
    """

    positions: Any
    offsets: Any
    weights: Any = None


class Terms(NamedTuple):
    """Holds the terms whose sums are the gradients of rows.

    Attributes:
        terms: [K, 2] uint32, for each id its sample and, as the bits of a float32, the factor of
            that sample's gradient.
        along: [K] float32, the factor with which the row itself adds to its gradient; None if no
            look-up has a max_norm.
        weights: [K] float32, the gradients of weights, 0 for a look-up that has none; None if they
            weren't requested.
    """

    terms: Any
    along: Any
    weights: Any


def pool(
    lookups: Sequence[Lookup],
    rows: Sequence[Rows],
    ids: Ids,
    workspace: Workspace,
) -> list[Any]:
    """Returns [B, D] float32 for each look-up: the parts of `pool_flat`."""
    return parts(lookups, pool_flat(lookups, rows, ids, workspace))


def parts(lookups: Sequence[Lookup], flat: Any) -> list[Any]:
    """Cuts the result of `pool_flat` into [B, D] for each look-up."""
    sizes = [lookup.samples * lookup.dim for lookup in lookups]
    return [
        flat[end - size : end].reshape(lookup.samples, lookup.dim)
        for lookup, size, end in zip(lookups, sizes, itertools.accumulate(sizes))
    ]


def pool_flat(
    lookups: Sequence[Lookup],
    rows: Sequence[Rows],
    ids: Ids,
    workspace: Workspace,
) -> Any:
    """Computes `tf.nn.embedding_lookup_sparse` of each look-up, float32 [B, D] one after the other;
    a sample without ids is zeros, and so is one whose weights (for SQRTN: their squares) add up to
    0.

    Sums are float32, sums of weights float64. One kernel, two if there is a max_norm; the host
    waits for nothing. Bytes moved: 4 per sample; per id 4 (64-bit positions: 8; weights: 4 more)
    and D elements read; D elements per sample written. With a max_norm, 8 bytes and D elements more
    per id.

    Args:
        lookups: M of them.
        rows: by the look-ups' `source`.
        ids: their ids.
        workspace: holds the result until the next call with it.

    Raises:
        ValueError: a look-up is weighted and there are no weights, or has an unknown combiner.
    """
    check_lookups(lookups, ids)
    device = workspace.device
    sizes = np.array([lookup.samples * lookup.dim for lookup in lookups], np.int64)
    out = workspace.take("pool", int(sizes.sum()), np.float32)
    firsts = np.cumsum(sizes) - sizes
    words_by_source = [one.words() for one in rows]
    runs, by_lookup = _runs(lookups, words_by_source, workspace)
    squares = (
        _products(lookups, rows, ids, None, workspace)
        if any(lookup.max_norm > 0 for lookup in lookups)
        else NULL
    )
    addresses = device.pointer(out) + firsts * _FLOAT_BYTES
    samples = sum(lookup.samples for lookup in lookups)
    each = None if ids.positions.size <= samples or samples >= _MANY else _IN_FLIGHT
    words, tiles = _words(lookups, by_lookup, addresses, _addresses(ids, device), each)
    given = _given(words, ids, squares, workspace, "pool.lookups")
    name = "pool_rows_plain" if _are_plain(lookups, words_by_source, addresses) else "pool_rows"
    device.kernel(SOURCE, name)(tiles, THREADS, (*given, runs))
    return out


def _are_plain(lookups: Sequence[Lookup], words: Sequence[np.ndarray], out: np.ndarray) -> bool:
    """Tells whether all rows are used unchanged, each look-up's from one run, by whole accesses:
    then the faster kernel can be used.

    Args:
        words: the words of `Rows.words`, by source.
        out: the addresses of the results.
    """
    if any(lookup.weighted or lookup.max_norm > 0 or lookup.dim % _WIDTH for lookup in lookups):
        return False
    addresses = [runs[0, 2] for runs in words] + out.tolist()
    return all(len(runs) == 1 for runs in words) and not any(
        address % _ACCESS_BYTES for address in addresses
    )


def pool_terms(
    lookups: Sequence[Lookup],
    rows: Sequence[Rows],
    ids: Ids,
    gradients: Rows,
    workspace: Workspace,
    of_weights: bool = False,
) -> Terms:
    """Makes the terms whose sums are the rows' gradients. One kernel; two more with a max_norm; two
    more for gradients of weights.

    Bytes moved: 4 per sample, 8 (with weights: 4 more) per id. With a max_norm, and for gradients
    of weights, rows and gradients are read for each id, too.

    Args:
        lookups, rows, ids: as for `pool`.
        gradients: the gradients of its results: M runs of [B, D].
        workspace: holds the result until the next call with it.
        of_weights: whether gradients of weights are requested.
    """
    check_lookups(lookups, ids)
    clips = any(lookup.max_norm > 0 for lookup in lookups)
    size = int(ids.positions.size)
    squares = _products(lookups, rows, ids, None, workspace) if clips else NULL
    products = _products(lookups, rows, ids, gradients, workspace) if clips or of_weights else NULL
    terms = workspace.take("pool_terms.terms", 2 * size, np.uint32).reshape(size, 2)
    along = workspace.take("pool_terms.along", size, np.float32) if clips else NULL
    made = workspace.take("pool_terms.weights", size, np.float32) if of_weights else None
    device = workspace.device
    words, tiles = _words(
        lookups,
        np.zeros((len(lookups), 2), np.int64),
        np.full(len(lookups), 0 if made is None else device.pointer(made)),
        _addresses(ids, device),
        1,
        lanes=1,
    )
    given = _given(words, ids, squares, workspace, "pool_terms.lookups")
    device.kernel(SOURCE, "pool_terms")(
        tiles, THREADS, (*given, products, terms, along, NULL, np.int64(0))
    )
    if of_weights:
        device.kernel(SOURCE, "pool_weights")(tiles, THREADS, (*given, products))
    return Terms(terms, along if clips else None, made)


def check_lookups(lookups: Sequence[Lookup], ids: Ids) -> None:
    """Raises the errors of `pool`."""
    for number, lookup in enumerate(lookups):
        if lookup.combiner not in (SUM, MEAN, SQRTN):
            raise ValueError(
                f"look-up {number} has the combiner {lookup.combiner}, not {SUM}, {MEAN} or {SQRTN}"
            )
        if lookup.weighted and ids.weights is None:
            raise ValueError(f"look-up {number} is weighted, but there are no weights")
    samples = sum(lookup.samples for lookup in lookups)
    if ids.offsets.size != samples + 1:
        raise ValueError(
            f"offsets must be one more than the samples, {samples + 1}, but there are "
            f"{ids.offsets.size}"
        )


def _runs(
    lookups: Sequence[Lookup], words: Sequence[np.ndarray], workspace: Workspace
) -> tuple[Any, np.ndarray]:
    """Returns the runs of all sources on the device, and [M, 2], for each look-up the number of its
    first run and the number of its runs. `words` are those of `Rows.words`.
    """
    counts = np.array([len(one) for one in words], np.int64)
    of = np.array([lookup.source for lookup in lookups], np.int64)
    return (
        workspace.upload("pool.runs", np.concatenate(words)),
        np.stack([(np.cumsum(counts) - counts)[of], counts[of]], 1),
    )


def _words(
    lookups: Sequence[Lookup],
    runs: np.ndarray,
    out: np.ndarray,
    ids: tuple[int, int],
    each: int | None,
    lanes: int | None = None,
) -> tuple[np.ndarray, int]:
    """Returns ([M, 14] int64 as pool.cu reads them, how many tiles they have).

    A group of lanes has `each` samples, or one per lane. `ids`: the addresses of positions and
    weights.
    """
    samples = np.array([lookup.samples for lookup in lookups], np.int64)
    dims = np.array([lookup.dim for lookup in lookups], np.int64)
    norms = np.array([max(lookup.max_norm, 0) for lookup in lookups], np.float32).view(np.uint32)
    firsts = np.cumsum(samples) - samples
    group = group_lanes(dims) if lanes is None else np.full_like(dims, lanes)
    of_group = group if each is None else np.full_like(group, each)
    tiles = -(-samples // (THREADS // group * of_group))
    words = np.column_stack(
        [
            np.cumsum(tiles) - tiles,
            firsts,
            firsts + samples,
            dims,
            group,
            out,
            runs,
            [lookup.combiner for lookup in lookups],
            [lookup.weighted for lookup in lookups],
            norms,
            *(np.full(len(lookups), address) for address in ids),
            of_group,
        ]
    )
    return words[samples > 0].astype(np.int64), int(tiles.sum())


def _addresses(ids: Ids, device: Device) -> tuple[int, int]:
    return device.pointer(ids.positions), 0 if ids.weights is None else device.pointer(ids.weights)


def _given(
    words: np.ndarray, ids: Ids, squares: Any, workspace: Workspace, name: str
) -> tuple[Any, ...]:
    return (
        workspace.upload(name, words),
        np.int32(len(words)),
        np.int32(ids.positions.dtype == np.int64),
        ids.offsets,
        squares,
    )


def _products(
    lookups: Sequence[Lookup],
    rows: Sequence[Rows],
    ids: Ids,
    gradients: Rows | None,
    workspace: Workspace,
) -> Any:
    """Multiplies each id's row by itself, or by its sample's gradient: [K] float32."""
    name = "pool.squares" if gradients is None else "pool.products"
    products = workspace.take(name, int(ids.positions.size), np.float32)
    runs, by_lookup = _runs(lookups, [one.words() for one in rows], workspace)
    words, tiles = _words(
        lookups,
        by_lookup,
        np.zeros(len(lookups), np.int64),
        _addresses(ids, workspace.device),
        1,
    )
    gradient_runs, count = NULL, 0
    if gradients is not None:
        known = gradients.words()
        gradient_runs, count = workspace.upload("pool.gradients", known), len(known)
    given = _given(words, ids, NULL, workspace, f"{name}.lookups")
    workspace.device.kernel(SOURCE, "pool_products")(
        tiles, THREADS, (*given, runs, gradient_runs, np.int32(count), products)
    )
    return products
