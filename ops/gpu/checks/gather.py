"""Checks and measurements of `collective.ops.gpu.gather`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from collective.ops.gpu import gather as kernels
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import on, values
from collective.ops.gpu.device import Device
from collective.ops.gpu.elements import BFLOAT16, ELEMENTS, FLOAT16, FLOAT32, Element, to_float32
from collective.ops.gpu.reference import gather as reference
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.workspace import Workspace

DIMS = (1, 3, 4, 16, 100, 128, 1024)


def _agree(
    device: Device,
    tables: list[np.ndarray],
    rows: np.ndarray,
    segments: Segments,
    element: Element,
    wire: Element,
    workspace: Workspace,
) -> None:
    got = device.download(
        kernels.gather(
            [on(device, table) for table in tables],
            on(device, rows),
            segments,
            element,
            wire,
            workspace,
        )
    )
    wanted = reference.gather(tables, rows, segments, element, wire)
    what = f"{element} as {wire}, dimensions {[table.shape[1] for table in tables]}"
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    if element is wire:
        bits = f"u{wire.size}"
        assert np.array_equal(got.view(bits), wanted.view(bits)), what
    else:  # any NaN is as good as another
        assert np.array_equal(to_float32(got, wire), to_float32(wanted, wire), equal_nan=True), what


def one_table(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Every dimension and pair of types; rows repeat, and some are outside of the table."""
    workspace = Workspace(device)
    for dim, element, wire in itertools.product(DIMS, ELEMENTS, ELEMENTS):
        size = max(scale.keys // 4 // dim, 3)
        table = values((size // 2 + 1, dim), element, rng)
        rows = rng.integers(-1, len(table) + 1, size)
        rows[:2] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        _agree(device, [table], rows, Segments.of([size], [0]), element, wire, workspace)


def many_tables(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Tables of all dimensions in one launch, in an order that misaligns some of them in the
    buffer; one table has no rows.
    """
    workspace = Workspace(device)
    for element, wire in ((FLOAT32, FLOAT32), (FLOAT32, BFLOAT16), (FLOAT16, FLOAT16)):
        tables = [
            values((int(rng.integers(1, 60)), dim), element, rng)
            for dim in (16, 1, 128, 3, 4, 1024, 6)
        ]
        tables.append(np.zeros((0, 8), element.storage))
        lengths, sections = (
            rng.integers(0, max(scale.keys // 100, 5), 20),
            rng.integers(0, len(tables), 20),
        )
        lengths[3] = 0
        rows = np.concatenate(
            [rng.integers(0, len(tables[t]) + 1, n) for n, t in zip(lengths, sections)]
        )
        _agree(device, tables, rows, Segments.of(lengths, sections), element, wire, workspace)


def nothing(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """No rows."""
    _agree(
        device,
        [values((3, 4), FLOAT32, rng)],
        np.zeros(0, np.int64),
        Segments.of([0], [0]),
        FLOAT32,
        FLOAT16,
        Workspace(device),
    )


def large_table(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """The last rows of a table that has more elements than 32 bits can count."""
    table = device.zeros((scale.elements // 128, 128), np.float16)
    last = values((5, 128), FLOAT16, rng)
    table[-5:] = on(device, last)
    rows = np.arange(len(table) - 5, len(table))
    got = kernels.gather(
        [table], on(device, rows), Segments.of([5], [0]), FLOAT16, FLOAT16, Workspace(device)
    )
    np.testing.assert_array_equal(device.download(got).reshape(5, 128), last)


CHECKS = (one_table, many_tables, nothing, large_table)


def _timed(
    device: Device,
    scale: Scale,
    rng: np.random.Generator,
    dim: int,
    element: Element,
    wire: Element,
) -> Measurement:
    tables: list[Any] = [
        device.zeros(
            (max(scale.measured_bytes // 4 // (dim * element.size), 1), dim), element.storage
        )
        for _ in range(4)
    ]
    each = max(scale.measured_bytes // 32 // (dim * element.size), 1)
    segments, workspace = Segments.of([each] * 4, list(range(4))), Workspace(device)
    inputs = [on(device, rng.integers(0, len(tables[0]), 4 * each)) for _ in range(3)]

    def run(rows: Any) -> object:
        return kernels.gather(tables, rows, segments, element, wire, workspace)

    return Measurement(
        "gather",
        [partial(run, rows) for rows in inputs],
        4 * each * (8 + dim * (element.size + wire.size)),
        dim,
        f"{element}" if element is wire else f"{element} as {wire}",
        4 * each,
    )


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Rows at random of four large tables."""
    for dim in (4, 16, 32, 64, 128, 1024):
        yield _timed(device, scale, rng, dim, FLOAT32, FLOAT32)
    for dim, element, wire in itertools.product((16, 128), (FLOAT32, FLOAT16), (FLOAT16, BFLOAT16)):
        yield _timed(device, scale, rng, dim, element, wire)
