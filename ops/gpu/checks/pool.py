"""Checks and measurements of `collective.ops.gpu.pool`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from collective.ops.counting import counted
from collective.ops.gpu import pool as kernels
from collective.ops.gpu import update as updates
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import on, values
from collective.ops.gpu.checks.sums import DIMS, TOLERANCE, assert_close
from collective.ops.gpu.device import Device
from collective.ops.gpu.occurrences import occurrences
from collective.ops.gpu.pool import MEAN, SQRTN, SUM, Ids, Lookup
from collective.ops.gpu.reference import occurrences as reference_occurrences
from collective.ops.gpu.reference import pool as reference
from collective.ops.gpu.reference import sums as reference_sums
from collective.ops.gpu.rules import SGD, Adagrad, Rule
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sums import Rows, sum_rows
from collective.ops.gpu.workspace import Workspace

COMBINERS = (SUM, MEAN, SQRTN)


def lookup_cases(samples: int, dim: int) -> list[Lookup]:
    """Makes look-ups by every combiner, with and without weights and max_norm, one of no sample."""
    made = [
        Lookup(samples, dim, combiner, weighted, norm)
        for combiner, weighted, norm in itertools.product(COMBINERS, (False, True), (0.0, 0.9))
    ]
    return [*made, Lookup(0, dim)]


def ids_for(
    lookups: Sequence[Lookup],
    rows: int,
    rng: np.random.Generator,
    wide: bool = False,
    most: int = 5,
) -> Ids:
    """Draws samples of up to `most` ids, among them empty ones, one with many, and one whose
    weights cancel out.
    """
    lengths = rng.integers(0, most + 1, sum(lookup.samples for lookup in lookups))
    if len(lengths) > 3:
        lengths[[1, -1]] = 0, 70
        lengths[2] = 2
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    weights = rng.uniform(-0.5, 2, offsets[-1]).astype(np.float32)
    for number in range(2, len(lengths), 7):
        weights[offsets[number] : offsets[number + 1]] = 0
    return Ids(
        rng.integers(0, rows, offsets[-1]).astype(np.int64 if wide else np.int32), offsets, weights
    )


def _there(device: Device, ids: Ids) -> Ids:
    return Ids(*(on(device, array) for array in ids))


def _agree(
    device: Device,
    lookups: Sequence[Lookup],
    tables: list[np.ndarray],
    ids: Ids,
    workspace: Workspace,
    what: str,
) -> None:
    arrays: list[Any] = [on(device, table) for table in tables]
    rows = [Rows.of([array], device) for array in arrays]
    got = kernels.pool(lookups, rows, _there(device, ids), workspace)
    for lookup, pooled, wanted in zip(lookups, got, reference.pool(lookups, tables, ids)):
        here = device.download(pooled)
        assert here.shape == wanted.shape and here.dtype == wanted.dtype, what
        assert_close(here, wanted, 3 * TOLERANCE, f"{lookup} of {what}")


def forward(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Pools rows of every dimension by every combiner; one id is outside of the rows."""
    workspace = Workspace(device)
    for number, dim in enumerate(DIMS):
        lookups = lookup_cases(max(min(scale.keys, 2**16) // 200 // (dim + 8), 3), dim)
        ids = ids_for(lookups, 50, rng, number % 2 == 0)
        ids.positions[0] = 51
        table = (rng.standard_normal((50, dim)) / np.sqrt(dim)).astype(np.float32)
        _agree(device, lookups, [table], ids, workspace, f"dimension {dim}")


def several_tables(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Pools tables of several dimensions in one launch, as an owner does; no ids at all; one sample
    has all.
    """
    dims = (16, 1, 128, 3)
    tables = [rng.standard_normal((20, dim)).astype(np.float32) for dim in dims]
    lookups = [
        Lookup(7, dim, COMBINERS[number % 3], number % 2 == 0, source=number)
        for number, dim in enumerate(dims)
    ]
    ids, workspace = ids_for(lookups, 20, rng, wide=True), Workspace(device)
    _agree(device, lookups, tables, ids, workspace, "several tables")
    none = Ids(ids.positions[:0], np.zeros_like(ids.offsets), ids.weights[:0])
    _agree(device, lookups, tables, none, workspace, "no ids")
    offsets = np.full_like(ids.offsets, len(ids.positions))
    offsets[:10] = 0
    of_one_sample = Ids(ids.positions, offsets, ids.weights)
    _agree(device, lookups, tables, of_one_sample, workspace, "one sample")


def not_finite(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Keeps infinities and NaNs in their samples; a clipped infinite row is NaN where it is
    infinite and 0 elsewhere.
    """
    table = values((40, 8), rng)
    table[np.abs(table) > 1e30] = np.inf
    for norm in (0.0, 1.0):
        lookups = [Lookup(60, 8, combiner, max_norm=norm) for combiner in COMBINERS]
        ids = ids_for(lookups, 40, rng)
        workspace, there = Workspace(device), on(device, table)
        got = kernels.pool(lookups, [Rows.of([there], device)], _there(device, ids), workspace)
        for pooled, wanted in zip(got, reference.pool(lookups, [table], ids)):
            here = device.download(pooled)
            np.testing.assert_array_equal(np.isnan(here), np.isnan(wanted), f"max_norm {norm}")
            np.testing.assert_array_equal(np.isinf(here), np.isinf(wanted), f"max_norm {norm}")


def backward(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Makes gradients of rows and of weights, by every combiner and several dimensions."""
    for dim in (3, 16, 128):
        _backward(device, dim, rng)


def _backward(device: Device, dim: int, rng: np.random.Generator) -> None:
    workspace, lookups, rows = Workspace(device), lookup_cases(max(300 // dim, 4), dim), 30
    ids = ids_for(lookups, rows, rng)
    ids.positions[:90] = 7
    table = (rng.standard_normal((rows, dim)) / np.sqrt(dim)).astype(np.float32)
    gradients = [rng.standard_normal((one.samples, dim)).astype(np.float32) for one in lookups]
    arrays: list[Any] = [on(device, array) for array in (table, *gradients)]
    own, given = Rows.of(arrays[:1], device), Rows.of(arrays[1:], device)
    there = _there(device, ids)
    got = kernels.pool_terms(lookups, [own], there, given, workspace, of_weights=True)
    wanted = reference.pool_terms(lookups, [table], ids, gradients, of_weights=True)
    terms = device.download(got.terms)
    np.testing.assert_array_equal(terms[:, 0], wanted.terms[:, 0])
    got_factors, wanted_factors = (
        one[:, 1].copy().view(np.float32) for one in (terms, wanted.terms)
    )
    assert_close(got_factors, wanted_factors, 2e-5, f"factors, dimension {dim}")
    assert_close(device.download(got.along), wanted.along, 2e-5, f"along, dimension {dim}")
    assert_close(device.download(got.weights), wanted.weights, 2e-5, f"weights, dimension {dim}")
    segments = Segments.of([rows], [0])
    found = occurrences(there.positions, rows, workspace)
    known = reference_occurrences.occurrences(ids.positions, rows)
    summed = device.download(
        sum_rows(given, found, segments, [dim], workspace, got.terms, 1.0, got.along, own)
    )
    wanted_sums = reference_sums.sum_rows(
        gradients, known, segments, [dim], None, wanted.terms, 1.0, wanted.along, [table]
    )
    assert_close(summed, wanted_sums, 2e-5, f"gradients, dimension {dim}")


CHECKS = (forward, several_tables, not_finite, backward)


def _timed(
    device: Device,
    scale: Scale,
    rng: np.random.Generator,
    dim: int,
    length: int,
    rule: Rule | None = None,
) -> Measurement:
    slots = 0 if rule is None else rule.slots
    rows = max(scale.measured_bytes // (4 * dim) // (2 + 2 * slots), 64)
    size = max(min(rows, scale.measured_keys), 64) // 2 // length * length
    table = device.zeros((rows, dim), np.float32)
    offsets: Any = on(device, np.arange(0, size + 1, length, dtype=np.int32))
    lookups, workspace = [Lookup(size // length, dim)], Workspace(device)
    if rule is None:
        inputs = [Ids(on(device, rng.integers(0, rows, size)), offsets) for _ in range(2)]

        def forward_of(ids: Ids) -> object:
            return kernels.pool(lookups, [Rows.of([table], device)], ids, workspace)

        return Measurement(
            f"pool, {counted(length, 'id')} a sample",
            [partial(forward_of, ids) for ids in inputs],
            size * (8 + 4 * dim) + size // length * (4 + 4 * dim),
            dim,
            "float32",
            size,
        )
    state = updates.Table(table, [device.zeros((rows, dim), np.float32) for _ in range(slots)])
    for slot in state.slots:
        slot.fill(1)
    drawn, inverse = np.unique(rng.integers(0, rows, size), return_inverse=True)
    local, numbers = on(device, drawn), on(device, inverse.reshape(-1).astype(np.int32))
    gradients = [device.zeros((size // length, dim), np.float32) for _ in range(2)]

    def backward_of(gradient: Any) -> None:
        ids, given = Ids(numbers, offsets), Rows.of([gradient], device)
        terms = kernels.pool_terms(lookups, [Rows.of([table], device)], ids, given, workspace)
        found = occurrences(numbers, len(drawn), workspace, terms=terms.terms)
        segments = Segments.of([len(drawn)], [0])
        updates.update(rule, [state], local, segments, given, found, workspace)

    return Measurement(
        f"pool backward, {rule.kernel}",
        [partial(backward_of, gradient) for gradient in gradients],
        size // length * 4 * dim + len(drawn) * 8 * dim * (1 + slots) + 4 * size,
        dim,
        "float32",
        size,
    )


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures pooling from a large table, with one id and with 20 a sample; and the gradients with
    the update, all that it needs included.
    """
    for dim, length in itertools.product((16, 128), (1, 20)):
        yield _timed(device, scale, rng, dim, length)
    for dim, rule in itertools.product((16, 128), (SGD(0.1), Adagrad(0.1))):
        yield _timed(device, scale, rng, dim, 1, rule)
    yield _timed(device, scale, rng, 128, 20, Adagrad(0.1))
