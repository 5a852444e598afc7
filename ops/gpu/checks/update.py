"""Checks and measurements of `collective.ops.gpu.update`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from collective.ops.gpu import update as kernels
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import on
from collective.ops.gpu.checks.sums import DIMS, Case, assert_close, case
from collective.ops.gpu.device import Device
from collective.ops.gpu.occurrences import PIECE, Occurrences, occurrences
from collective.ops.gpu.reference import update as reference
from collective.ops.gpu.rules import (
    EXAMPLES,
    SGD,
    Adagrad,
    Adam,
    Ftrl,
    Momentum,
    RMSProp,
    RowWiseAdagrad,
    Rule,
)
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sums import Rows
from collective.ops.gpu.update import Table
from collective.ops.gpu.workspace import Workspace


def tables_for(rule: Rule, shapes: list[tuple[int, int]], rng: np.random.Generator) -> list[Table]:
    """Makes tables with slots as they are after some steps."""
    made = []
    for shape in shapes:
        slots = []
        for number in range(rule.slots):
            signed = isinstance(rule, (Momentum, Adam, Ftrl, RMSProp)) and (
                number > 0
            ) != isinstance(rule, (Momentum, Adam))
            slot = rng.uniform(0.5, 1.5, (shape[0], 1) if rule.row_wise else shape)
            slots.append(((slot - 1) * 0.5 if signed else slot).astype(np.float32))
        made.append(Table(rng.standard_normal(shape).astype(np.float32), slots))
    return made


def _agree(
    device: Device,
    rule: Rule,
    tables: list[Table],
    rows: np.ndarray,
    one: Case,
    workspace: Workspace,
    steps: int = 1,
    bounds: list[float] | None = None,
) -> None:
    there = [
        Table(on(device, table.weights), [on(device, slot) for slot in table.slots])
        for table in tables
    ]
    gradients, found, _alive = one.there(device, workspace)
    matrices, known = one.here()
    for _ in range(steps):
        kernels.update(
            rule,
            there,
            on(device, rows),
            one.segments,
            gradients,
            found,
            workspace,
            bounds=bounds,
        )
        reference.update(rule, tables, rows, one.segments, matrices, known, None, one.terms, bounds)
    what = f"{rule} within {bounds} on {[table.weights.shape for table in tables]}"
    for got, wanted in zip(there, tables):
        assert_close(device.download(got.weights), wanted.weights, 2e-5, f"weights of {what}")
        for number, (slot, wanted_slot) in enumerate(zip(got.slots, wanted.slots)):
            assert_close(device.download(slot), wanted_slot, 2e-5, f"slot {number} of {what}")


def every_rule(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Updates tables of several dimensions in one launch; rows are rare and frequent, and some are
    outside of the table.
    """
    shapes, lengths, each = [(80, 16), (50, 3), (6, 160)], [50, 30, 3], [150, 90, 600]
    dims = [dim for _, dim in shapes]
    for number, rule in enumerate(EXAMPLES):
        one = case(lengths, dims, each, number % 2 == 0, True, rng)
        rows = np.concatenate(
            [rng.permutation(count)[:length] for (count, _), length in zip(shapes, lengths)]
        )
        rows[[3, 60]] = -1, 50
        tables = tables_for(rule, shapes, rng)
        bounds = [np.inf, 0.25, 0.75] if number % 3 == 0 else None
        _agree(device, rule, tables, rows, one, Workspace(device), 2, bounds)


def every_dimension(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Updates rows of every dimension by a rule with a slot."""
    workspace, rule = Workspace(device), Adagrad(0.1)
    for dim in DIMS:
        size = max(min(scale.keys, 2**20) // 32 // (dim + 16), 3)
        one = case([size], [dim], [2 * size], False, True, rng)
        tables = tables_for(rule, [(size + 5, dim)], rng)
        _agree(device, rule, tables, rng.permutation(size), one, workspace)


def hot_row(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Updates a row with so many occurrences that a block sums its pieces, and a row that a warp
    sums, next to a rare one.
    """
    numbers = rng.permutation(np.repeat([0, 1, 2], [9 * PIECE, 2 * PIECE, 1])).astype(np.int32)
    for rule in (Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.01, step=2)):
        for dim in (4, 132):
            made = 0.01 * rng.standard_normal((len(numbers), dim)).astype(np.float32)
            one = Case(Segments.of([3], [0]), [dim], numbers, None, [made])
            tables = tables_for(rule, [(5, dim)], rng)
            _agree(device, rule, tables, np.array([4, 0, 2]), one, Workspace(device))


def not_finite(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Keeps a NaN and an infinity in the rows that they belong to."""
    one = case([20], [4], [60], False, True, rng)
    one.gradients[0][7] = np.nan
    one.gradients[0][8] = np.inf
    tables = tables_for(SGD(1.0), [(20, 4)], rng)
    _agree(device, SGD(1.0), tables, np.arange(20), one, Workspace(device))


def nothing(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Changes nothing without gradients, except for Adam that isn't lazy."""
    gradients = [np.zeros((0, 4), np.float32)]
    for rule in (Adagrad(0.1), Adam(0.1)):
        one = Case(Segments.of([0, 4], [0, 1]), [4, 4], np.zeros(0, np.int32), None, gradients)
        tables = tables_for(rule, [(9, 4), (300, 4)], rng)
        _agree(device, rule, tables, np.arange(4), one, Workspace(device), steps=2)


CHECKS = (every_rule, every_dimension, hot_row, not_finite, nothing)


def _timed(
    device: Device, scale: Scale, rng: np.random.Generator, rule: Rule, dim: int
) -> Measurement:
    total = max(scale.measured_bytes // 2 // (4 * dim) // (1 + rule.slots), 64)
    slots = [device.zeros((total, dim), np.float32) for _ in range(rule.slots)]
    for slot in slots:
        slot.fill(1)
    table = Table(device.zeros((total, dim), np.float32), slots)
    size = total // 8
    gradients = device.zeros((size, dim), np.float32)
    workspace, segments = Workspace(device), Segments.of([size], [0])
    found = occurrences(on(device, rng.permutation(size).astype(np.int32)), size, workspace)
    inputs: list[Any] = [on(device, rng.choice(total, size, replace=False)) for _ in range(2)]

    def run(rows: Any, found: Occurrences) -> None:
        given = Rows.of([gradients], device)
        kernels.update(rule, [table], rows, segments, given, found, workspace)

    return Measurement(
        f"update: {rule.kernel}",
        [partial(run, rows, found) for rows in inputs],
        size * (16 + 4 * dim + 8 * dim * (1 + rule.slots)),
        dim,
        "float32",
        size,
    )


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures distinct random rows of one large table."""
    rules = (SGD(0.1), Adagrad(0.1), Adam(0.1, lazy=True), Ftrl(0.1))
    for dim, rule in itertools.product((16, 128), rules):
        yield _timed(device, scale, rng, rule, dim)
