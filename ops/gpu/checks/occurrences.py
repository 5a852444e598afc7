"""Checks and measurements of `collective.ops.gpu.occurrences`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from collective.ops.gpu import occurrences as kernels
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import assert_same, on
from collective.ops.gpu.device import Device
from collective.ops.gpu.reference import occurrences as reference
from collective.ops.gpu.workspace import Workspace


def number_cases(most: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray, int]]:
    """Yields names, the int32 rows of occurrences, and how many rows there are."""
    yield "none", np.zeros(0, np.int32), 5
    yield "none of no row", np.zeros(0, np.int32), 0
    yield "one", np.zeros(1, np.int32), 1
    yield "all equal", np.full(most, 3, np.int32), 7
    yield "all distinct", rng.permutation(most).astype(np.int32), most
    yield (
        "as many as are not cut",
        np.repeat(np.arange(9, dtype=np.int32), [63, 64, 65, 0, 511, 512, 513, 1, 1024]),
        9,
    )
    yield "few", rng.integers(0, 300, most, np.int32), 300
    yield "ascending", np.sort(rng.integers(0, most, most // 2, np.int32)), most + 1
    yield (
        "far apart",
        np.sort(rng.integers(0, 40 * most, most // 4, np.int32))[rng.permutation(most // 4)],
        50 * most,
    )
    yield (
        "with many in between",
        np.concatenate([np.arange(60), np.arange(900, 960)]).astype(np.int32),
        2000,
    )
    yield (
        "with many before the last of a block's and its first",
        np.repeat(np.array([767, 1024], np.int32), [100, 70]),
        1025,
    )
    yield "skewed", np.minimum(rng.zipf(1.2, most) - 1, 2**17).astype(np.int32), 2**17 + 1


def by_row(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Orders occurrences; rows with many of them come in any order."""
    workspace = Workspace(device)
    for name, numbers, rows in number_cases(scale.keys, rng):
        got = kernels.occurrences(on(device, numbers), rows, workspace)
        wanted = reference.occurrences(numbers, rows)
        for field in ("offsets", "order", "counters"):
            assert_same(
                device, getattr(got, field), getattr(wanted, field), f"{field} of rows {name}"
            )
        longs, pieces = wanted.counters
        listed, of_rows = device.download(got.longs)[:longs], device.download(got.pieces)[:pieces]
        listed = listed[np.argsort(listed[:, 0])]
        np.testing.assert_array_equal(listed[:, [0, 2]], wanted.longs[:, [0, 2]], f"rows {name}")
        found = [of_rows[first : first + count] for _, first, count in listed]
        np.testing.assert_array_equal(
            np.concatenate(found) if found else of_rows, wanted.pieces, f"pieces of rows {name}"
        )


CHECKS = (by_row,)


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures many distinct rows, and few; and most rows without any."""
    size, workspace = scale.measured_keys, Workspace(device)
    for name, rows in (("", size), (", few rows", 1000)):
        inputs: list[Any] = [on(device, rng.integers(0, rows, size, np.int32)) for _ in range(3)]
        run = partial(kernels.occurrences, rows=rows, workspace=workspace)
        yield Measurement(
            f"occurrences{name}",
            [partial(run, numbers) for numbers in inputs],
            8 * size + 4 * rows,
            keys=size,
        )
    run = partial(kernels.occurrences, rows=size, workspace=workspace)
    last: list[Any] = [on(device, np.full(1000, row, np.int32)) for row in (size - 1, size - 2)]
    yield Measurement(
        "occurrences, in the last row",
        [partial(run, numbers) for numbers in last],
        4 * size,
        keys=1000,
    )
