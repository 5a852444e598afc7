"""Checks and measurements of `collective.ops.gpu.gather`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from collective.ops.gpu import gather as kernels
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import on, values
from collective.ops.gpu.device import Device
from collective.ops.gpu.reference import gather as reference
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.workspace import Workspace

DIMS = (1, 3, 4, 16, 100, 128, 1024)


def _agree(
    device: Device,
    tables: list[np.ndarray],
    rows: np.ndarray,
    segments: Segments,
    workspace: Workspace,
) -> None:
    there = [on(device, table) for table in tables]
    got = device.download(kernels.gather(there, on(device, rows), segments, workspace))
    wanted = reference.gather(tables, rows, segments)
    what = f"dimensions {[table.shape[1] for table in tables]}"
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32)), what


def one_table(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Gathers rows of every dimension; rows repeat, and some are outside of the table."""
    workspace = Workspace(device)
    for dim in DIMS:
        size = max(scale.keys // 4 // dim, 3)
        table = values((size // 2 + 1, dim), rng)
        rows = rng.integers(-1, len(table) + 1, size)
        rows[:2] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        _agree(device, [table], rows, Segments.of([size], [0]), workspace)


def many_tables(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Gathers from tables of all dimensions in one launch, in an order that misaligns some of them
    in the buffer; one table has no rows.
    """
    workspace = Workspace(device)
    for _ in range(3):
        dims = (16, 1, 128, 3, 4, 1024, 6)
        tables = [values((int(rng.integers(1, 60)), dim), rng) for dim in dims]
        tables.append(np.zeros((0, 8), np.float32))
        lengths = rng.integers(0, max(scale.keys // 100, 5), 20)
        sections = rng.integers(0, len(tables), 20)
        lengths[3] = 0
        rows = np.concatenate(
            [rng.integers(0, len(tables[t]) + 1, n) for n, t in zip(lengths, sections)]
        )
        _agree(device, tables, rows, Segments.of(lengths, sections), workspace)


def nothing(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Gathers no rows."""
    rows = np.zeros(0, np.int64)
    _agree(device, [values((3, 4), rng)], rows, Segments.of([0], [0]), Workspace(device))


def large_table(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Gathers the last rows of a table that has more elements than 32 bits can count."""
    table = device.zeros((scale.elements // 128, 128), np.float32)
    last = values((5, 128), rng)
    table[-5:] = on(device, last)
    rows = np.arange(len(table) - 5, len(table))
    got = kernels.gather([table], on(device, rows), Segments.of([5], [0]), Workspace(device))
    np.testing.assert_array_equal(device.download(got).reshape(5, 128), last)


CHECKS = (one_table, many_tables, nothing, large_table)


def _timed(device: Device, scale: Scale, rng: np.random.Generator, dim: int) -> Measurement:
    rows = max(scale.measured_bytes // 4 // (4 * dim), 1)
    tables: list[Any] = [device.zeros((rows, dim), np.float32) for _ in range(4)]
    each = max(scale.measured_bytes // 32 // (4 * dim), 1)
    segments, workspace = Segments.of([each] * 4, list(range(4))), Workspace(device)
    inputs = [on(device, rng.integers(0, rows, 4 * each)) for _ in range(3)]

    def run(rows: Any) -> object:
        return kernels.gather(tables, rows, segments, workspace)

    runs = [partial(run, rows) for rows in inputs]
    return Measurement("gather", runs, 4 * each * (8 + 8 * dim), dim, "float32", 4 * each)


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures random rows of four large tables."""
    for dim in (4, 16, 32, 64, 128, 1024):
        yield _timed(device, scale, rng, dim)
