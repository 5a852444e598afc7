"""Checks how wide accesses to rows are: four elements at once wherever a row's address allows it,
whatever is next to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collective.ops.gpu import pool
from collective.ops.gpu.checks.inputs import on
from collective.ops.gpu.checks.sums import assert_close
from collective.ops.gpu.device import Device
from collective.ops.gpu.occurrences import occurrences
from collective.ops.gpu.reference import occurrences as reference_occurrences
from collective.ops.gpu.reference import pool as reference_pool
from collective.ops.gpu.reference import sums as reference_sums
from collective.ops.gpu.reference import update as reference_update
from collective.ops.gpu.rules import Adagrad
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sources import Source
from collective.ops.gpu.sums import Rows, sum_rows
from collective.ops.gpu.update import Table, update
from collective.ops.gpu.workspace import Workspace
from tests.kernels.gpu.emulator import EmulatedDevice
from tests.kernels.gpu.emulator.build import library
from tests.kernels.gpu.emulator.device import EmulatedKernel

# One thread for each access to a row: whether it is a single one.
_ASKED = """
extern "C" __global__ void whole(const char* row, i64 dim, int* answers) {
  const Span span(threadIdx.x, dim);
  answers[threadIdx.x] = span.is_whole(reinterpret_cast<const float*>(row) + span.element);
}
"""


def whole(offset: int, dim: int) -> list[int]:
    """Tells which accesses to a row so many bytes after a multiple of 256 are single ones."""
    device, accesses = EmulatedDevice(), -(-dim // 4)
    answers = device.empty(accesses, np.int32)
    built = library(Source("sums.cu", ()).text() + _ASKED, ("whole",))
    kernel = EmulatedKernel(device, built, "whole")
    kernel(1, accesses, (device.empty(64, np.uint8)[offset:], np.int64(dim), answers))
    return answers.tolist()


def test_an_access_is_whole_where_it_is_aligned():
    assert whole(0, 128) == [1] * 32
    assert whole(8, 128) == [0] * 32
    assert whole(4, 8) == [0, 0]
    assert whole(0, 6) == [1, 0], "the end of a row is two elements"
    assert whole(0, 3) == [0]


LENGTHS, DIMS = [5, 9, 7, 1, 6], [3, 16, 5, 128, 4]  # what lies after an odd row is anywhere


def _there(device: Device, ids: pool.Ids) -> pool.Ids:
    return pool.Ids(on(device, ids.positions), on(device, ids.offsets))


@pytest.mark.parametrize("seed", [0, 3])
def test_odd_rows_between_others(seed: int):
    """Rows that `gather` made are pooled, and their gradients, which lie as they do, are summed."""
    rng, device = np.random.default_rng(seed), EmulatedDevice(seed)
    segments, workspace = Segments.of(LENGTHS, range(5)), Workspace(EmulatedDevice(seed))
    matrices = [rng.standard_normal(shape).astype(np.float32) for shape in zip(LENGTHS, DIMS)]
    buffer = on(device, np.concatenate([matrix.reshape(-1) for matrix in matrices]))
    rows = Rows.flat(buffer, segments, DIMS, device)
    lookups = [pool.Lookup(10, dim, max_norm=1.0) for dim in DIMS]
    positions = np.concatenate(
        [rng.integers(first, end, 20) for first, end in zip(segments.offsets, segments.offsets[1:])]
    )
    ids = pool.Ids(positions.astype(np.int32), np.arange(0, 101, 2, dtype=np.int32))
    got = pool.pool(lookups, [rows], _there(device, ids), workspace)
    for number, (lookup, mine) in enumerate(zip(lookups, got)):
        own = pool.Ids(
            ids.positions[20 * number : 20 * number + 20] - segments.offsets[number],
            np.arange(0, 21, 2, np.int32),
        )
        (wanted,) = reference_pool.pool([lookup], [matrices[number]], own)
        assert_close(mine, wanted, 1e-5, f"dimension {lookup.dim}")
    summed = sum_rows(
        rows,
        occurrences(on(device, np.arange(28, dtype=np.int32)), 28, workspace),
        segments,
        DIMS,
        workspace,
    )
    known = reference_occurrences.occurrences(np.arange(28), 28)
    np.testing.assert_array_equal(
        summed,
        reference_sums.sum_rows(matrices, known, segments, DIMS),
    )


def test_tables_anywhere_are_updated():
    """Weights and slots that begin at no multiple of 16 bytes, as well as others that do."""
    rng, device, shapes = np.random.default_rng(1), EmulatedDevice(1), [(9, 16), (7, 3), (8, 128)]
    tables: list[Table] = []
    wanted: list[Table] = []
    for (rows, dim), offsets in zip(shapes, [(1, 0), (0, 3), (0, 0)]):
        arrays: list[Any] = []
        for offset in offsets:
            array = device.empty(rows * dim + 4, np.float32)[offset : offset + rows * dim].reshape(
                rows, dim
            )
            array[...] = rng.uniform(1, 2, (rows, dim))
            arrays.append(array)
        tables.append(Table(arrays[0], arrays[1:]))
        wanted.append(Table(arrays[0].copy(), [arrays[1].copy()]))
    segments, rows = (
        Segments.of([9, 7, 8], range(3)),
        np.concatenate([np.arange(9), np.arange(7), np.arange(8)]),
    )
    gradients = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    there = [on(device, gradient) for gradient in gradients]
    numbers = np.arange(24, dtype=np.int32)
    update(
        Adagrad(0.1),
        tables,
        on(device, rows),
        segments,
        Rows.of(there, device),
        occurrences(on(device, numbers), 24, workspace := Workspace(device)),
        workspace,
    )
    reference_update.update(
        Adagrad(0.1),
        wanted,
        rows,
        segments,
        gradients,
        reference_occurrences.occurrences(numbers, 24),
    )
    for mine, theirs in zip(tables, wanted):
        assert_close(mine.weights, theirs.weights, 1e-6, "weights")
        assert_close(mine.slots[0], theirs.slots[0], 1e-6, "slots")
