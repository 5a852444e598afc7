"""Checks and measurements of `collective.ops.gpu.reserved_memory`, as a device gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from collective.ops.gpu import gather, update
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import on
from collective.ops.gpu.device import Device
from collective.ops.gpu.occurrences import Occurrences
from collective.ops.gpu.rules import SGD
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sums import Rows
from collective.ops.gpu.update import Table
from collective.ops.gpu.workspace import Workspace

DIM = 16


def grown(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Takes memory piece by piece: what is there stays where it is; a size that is there already
    takes nothing.
    """
    row = DIM * 4
    rows = scale.elements // DIM
    reserved = device.reserve(rows * row)
    address, there = reserved.address, 0
    matrix = device.within(reserved, (rows, DIM), np.float32)
    values = np.zeros((0, DIM), np.float32)
    for wanted in (1, 100, rows // 3, rows // 3, rows):
        reserved.grow(wanted * row)
        assert reserved.address == address and reserved.taken >= wanted * row, (
            reserved.address,
            reserved.taken,
        )
        more = rng.normal(size=(min(wanted, 1000) - len(values), DIM)).astype(np.float32)
        matrix[len(values) : len(values) + len(more)] = on(device, more)
        values = np.concatenate([values, more])
        matrix[wanted - 1 : wanted] = on(device, np.full((1, DIM), wanted, np.float32))
        if wanted <= 1000:
            values[wanted - 1] = wanted
        np.testing.assert_array_equal(device.download(matrix[: len(values)]), values)
        assert np.all(device.download(matrix[wanted - 1 : wanted]) == wanted)
        assert reserved.taken >= there
        there = reserved.taken
    taken = reserved.taken
    reserved.grow(row)
    assert reserved.taken == taken


def kernels_in_it(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Gathers and updates rows where memory was taken piece by piece, next to missing memory."""
    rows = min(scale.keys, scale.elements // DIM // 4)
    reserved = device.reserve(4 * rows * DIM * 4)
    matrix = device.within(reserved, (4 * rows, DIM), np.float32)
    values = rng.normal(size=(rows, DIM)).astype(np.float32)
    for first in range(0, rows, max(1, rows // 5)):
        last = min(first + max(1, rows // 5), rows)
        reserved.grow(last * DIM * 4)
        matrix[first:last] = on(device, values[first:last])
    workspace, seen = Workspace(device), rng.permutation(rows)[: max(1, rows // 2)]
    segments, on_device = Segments.of([len(seen)], [0]), on(device, seen.astype(np.int64))
    found = gather.gather([matrix], on_device, segments, workspace)
    np.testing.assert_array_equal(device.download(found).reshape(-1, DIM), values[seen])
    ones = on(device, np.ones((len(seen), DIM), np.float32))
    update.update(
        SGD(0.5),
        [Table(matrix)],
        on_device,
        segments,
        Rows.of([ones], device),
        _once(device, len(seen)),
        workspace,
    )
    values[seen] -= np.float32(0.5)
    np.testing.assert_array_equal(device.download(matrix[:rows]), values)


def _once(device: Device, count: int) -> Occurrences:
    none = device.zeros((0, 3), np.uint32)
    return Occurrences(
        on(device, np.arange(count + 1, dtype=np.int32)),
        on(device, np.arange(count, dtype=np.int32)),
        device.zeros(2, np.uint32),
        none,
        none,
    )


CHECKS = (grown, kernels_in_it)


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures a copy from and to memory that was taken in 50 pieces: in percent of a copy of
    ordinary memory.
    """
    size = scale.measured_bytes // 4
    halves: list[Any] = []
    for _ in range(2):
        reserved = device.reserve(size)
        for piece in range(1, 51):
            reserved.grow(size * piece // 50)
        halves.append(device.within(reserved, (size // 4,), np.float32))
        halves[-1].fill(0)

    def copy(first: Any, second: Any) -> None:
        second[...] = first

    yield Measurement(
        "copy, memory that grew",
        [lambda: copy(*halves), lambda: copy(*reversed(halves))],
        2 * (size // 4 * 4),
    )
