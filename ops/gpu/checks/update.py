"""Checks and measurements of `collective.ops.gpu.update`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from collective.ops.gpu import update as kernels
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import on
from collective.ops.gpu.checks.sums import DIMS, Case, assert_close, case
from collective.ops.gpu.device import Device
from collective.ops.gpu.elements import ELEMENTS, FLOAT32, Element
from collective.ops.gpu.occurrences import Occurrences, occurrences
from collective.ops.gpu.reference import update as reference
from collective.ops.gpu.rules import (
    SGD,
    Adagrad,
    Adam,
    CenteredRMSProp,
    Ftrl,
    Momentum,
    RMSProp,
    RowwiseAdagrad,
    Rule,
)
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sums import Rows
from collective.ops.gpu.update import Table
from collective.ops.gpu.workspace import Workspace

RULES: tuple[Rule, ...] = (
    SGD(0.1),
    Momentum(0.1, 0.9),
    Momentum(0.1, 0.8, True),
    Adagrad(0.1),
    Adagrad(0.1, 1e-3),
    RowwiseAdagrad(0.1, 1e-8),
    Adam(0.01, step=3, lazy=True),
    Adam(0.01, step=2),
    Ftrl(0.1),
    Ftrl(0.1, 0.2, 0.3, 0.1),
    Ftrl(0.1, 0.1, 0.2, power=-0.7),
    RMSProp(0.01, 0.9, 0.5, 1e-3),
    CenteredRMSProp(0.01, 0.9, 0.5, 1e-3),
)


def tables_for(rule: Rule, shapes: list[tuple[int, int]], rng: np.random.Generator) -> list[Table]:
    """Tables with slots as they are after some steps."""
    made = []
    for shape in shapes:
        slots = []
        for number in range(rule.slots):
            signed = isinstance(rule, (Momentum, Adam, Ftrl, RMSProp)) and (
                number > 0
            ) != isinstance(rule, (Momentum, Adam))
            slot = rng.uniform(0.5, 1.5, shape[:1] if rule.rowwise else shape)
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
    scale: float = 1.0,
    bound: float = math.inf,
    steps: int = 1,
) -> None:
    there = [
        Table(on(device, table.weights), [on(device, slot) for slot in table.slots])
        for table in tables
    ]
    gradients, found, terms, _alive = one.there(device, workspace)
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
            terms,
            scale,
            bound,
        )
        reference.update(
            rule, tables, rows, one.segments, matrices, known, None, one.terms, scale, bound
        )
    what = f"{rule} on {[table.weights.shape for table in tables]} of {one.element}"
    for got, wanted in zip(there, tables):
        for name, mine, theirs in zip(
            ("weights", *map(str, range(3))),
            (got.weights, *got.slots),
            (wanted.weights, *wanted.slots),
        ):
            assert_close(device.download(mine), theirs, 2e-5, f"{name} of {what}")


def every_rule(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """On tables of several dimensions in one launch; rows rare and frequent, some of them not of
    the table.
    """
    shapes, lengths, each = [(80, 16), (50, 3), (6, 160)], [50, 30, 3], [150, 90, 600]
    for number, rule in enumerate(RULES):
        one = case(
            lengths,
            [dim for _, dim in shapes],
            each,
            ELEMENTS[number % 3],
            number % 2 == 0,
            True,
            rng,
        )
        rows = np.concatenate(
            [rng.permutation(count)[:length] for (count, _), length in zip(shapes, lengths)]
        )
        rows[[3, 60]] = -1, 50
        _agree(
            device,
            rule,
            tables_for(rule, shapes, rng),
            rows,
            one,
            Workspace(device),
            steps=2,
            scale=0.5,
        )


def every_dimension(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """By a rule with a slot of the table's shape, and by one with a slot for each row."""
    workspace = Workspace(device)
    for dim, rule in itertools.product(DIMS, (Adagrad(0.1), RowwiseAdagrad(0.1))):
        size = max(min(scale.keys, 2**20) // 32 // (dim + 16), 3)
        one = case([size], [dim], [2 * size], FLOAT32, False, True, rng)
        _agree(
            device,
            rule,
            tables_for(rule, [(size + 5, dim)], rng),
            rng.permutation(size),
            one,
            workspace,
        )


def bounded(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Weights stay within a bound, and a NaN stays one."""
    one = case([20], [4], [60], FLOAT32, False, True, rng)
    one.gradients[0][7] = np.nan
    one.gradients[0][8] = np.inf
    _agree(
        device,
        SGD(1.0),
        tables_for(SGD(1.0), [(20, 4)], rng),
        np.arange(20),
        one,
        Workspace(device),
        bound=0.5,
    )


def nothing(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """No gradients: nothing changes, but by Adam that isn't lazy."""
    for rule in (Adagrad(0.1), Adam(0.1)):
        one = Case(
            Segments.of([0, 4], [0, 1]),
            [4, 4],
            np.zeros(0, np.int32),
            None,
            [np.zeros((0, 4), np.float32)],
            FLOAT32,
        )
        _agree(
            device,
            rule,
            tables_for(rule, [(9, 4), (300, 4)], rng),
            np.arange(4),
            one,
            Workspace(device),
            steps=2,
        )


CHECKS = (every_rule, every_dimension, bounded, nothing)


def _timed(
    device: Device, scale: Scale, rng: np.random.Generator, rule: Rule, dim: int, element: Element
) -> Measurement:
    total = max(
        scale.measured_bytes // 2 // (4 * dim) // (1 + (0 if rule.rowwise else rule.slots)), 64
    )
    table = Table(
        device.zeros((total, dim), np.float32),
        [
            device.zeros(total if rule.rowwise else (total, dim), np.float32)
            for _ in range(rule.slots)
        ],
    )
    for slot in table.slots:
        slot.fill(1)
    size = total // 8
    gradients = device.zeros((size, dim), element.storage)
    workspace, segments = Workspace(device), Segments.of([size], [0])
    found = occurrences(on(device, rng.permutation(size).astype(np.int32)), size, workspace)
    inputs: list[Any] = [on(device, rng.choice(total, size, replace=False)) for _ in range(2)]

    def run(rows: Any, found: Occurrences) -> None:
        kernels.update(
            rule, [table], rows, segments, Rows.of([gradients], element, device), found, workspace
        )

    slots = 8 if rule.rowwise else 8 * dim * rule.slots
    return Measurement(
        f"update: {rule.kernel}",
        [partial(run, rows, found) for rows in inputs],
        size * (16 + element.size * dim + 8 * dim + slots),
        dim,
        element.name,
        size,
    )


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Distinct rows at random of one large table."""
    for dim, rule in itertools.product(
        (16, 128), (SGD(0.1), Adagrad(0.1), RowwiseAdagrad(0.1), Adam(0.1, lazy=True), Ftrl(0.1))
    ):
        yield _timed(device, scale, rng, rule, dim, FLOAT32)
    for element in ELEMENTS[1:]:
        yield _timed(device, scale, rng, Adagrad(0.1), 128, element)
