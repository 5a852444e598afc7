"""Checks and measurements of `collective.ops.gpu.distinct`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from collective.ops.counting import counted
from collective.ops.gpu import distinct as kernels
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import assert_same, key_cases, on, segment_cases
from collective.ops.gpu.device import Device
from collective.ops.gpu.reference import distinct as reference
from collective.ops.gpu.segments import DYNAMIC, STATIC, Segments
from collective.ops.gpu.workspace import Workspace

KINDS = (DYNAMIC, STATIC, STATIC, DYNAMIC)
TABLES, BATCH = 26, 65536  # of the DLRM workload


def _agree(
    device: Device,
    keys: np.ndarray,
    segments: Segments,
    ranks: int,
    workspace: Workspace,
    what: str,
) -> None:
    got = kernels.distinct(on(device, keys), segments, KINDS, ranks, workspace)
    wanted = reference.distinct(keys, segments, KINDS, ranks)
    assert_same(device, got.counts, wanted.counts, f"counts of {what}")
    assert_same(device, got.keys[: len(wanted.keys)], wanted.keys, f"keys of {what}")
    assert_same(device, got.inverse, wanted.inverse, f"inverse of {what}")


def any_keys(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """De-duplicates any keys, by any segments and numbers of ranks, in one workspace."""
    workspace = Workspace(device)
    for name, keys in key_cases(scale.keys, rng):
        for segments, ranks in zip(segment_cases(len(keys), len(KINDS), rng), (1, 3, 8)):
            _agree(
                device, keys, segments, ranks, workspace, f"keys {name}, {counted(ranks, 'rank')}"
            )


def repeated(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """De-duplicates batches of changing sizes, which must find nothing of earlier batches, even
    when the scratch table's words run out.
    """
    workspace = Workspace(device)
    for number, size in enumerate((1000, 300, 1500, 1, 2000, 2000)):
        table = workspace.keep("distinct", lambda: kernels.ScratchTable(workspace))
        if number == 3:
            table.base = 2**32 - 100
        keys = rng.integers(0, 700, size, np.int64)
        _agree(
            device,
            keys,
            Segments.of([size // 2, size - size // 2], [1, 3]),
            3,
            workspace,
            f"batch {number}",
        )


CHECKS = (any_keys, repeated)


def _timed(
    name: str, device: Device, batches: list[np.ndarray], segments: Segments, sections: int
) -> Measurement:
    workspace, size = Workspace(device), segments.keys
    kinds = [STATIC] * sections
    inputs: list[Any] = [on(device, keys) for keys in batches]
    counts = [int(reference.distinct(keys, segments, kinds, 8).counts.sum()) for keys in batches]
    run = partial(kernels.distinct, segments=segments, kinds=kinds, ranks=8, workspace=workspace)
    return Measurement(
        name,
        [partial(run, keys) for keys in inputs],
        12 * size + 8 * sum(counts) // len(counts),
        keys=size,
    )


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures batches of the DLRM workload, uniform and skewed, and as many keys as a check uses,
    on 8 ranks.
    """
    size = min(TABLES * BATCH, scale.measured_keys) // TABLES * TABLES
    by_table = Segments.of([size // TABLES] * TABLES, list(range(TABLES)))
    uniform = [rng.integers(0, 10**7, size, np.int64) for _ in range(3)]
    yield _timed("distinct, uniform", device, uniform, by_table, TABLES)
    skewed = [np.minimum(rng.zipf(1.2, size), 10**7).astype(np.int64) for _ in range(3)]
    yield _timed("distinct, skewed", device, skewed, by_table, TABLES)
    size = scale.measured_keys
    yield _timed(
        "distinct, one table",
        device,
        [rng.integers(0, 2**40, size, np.int64) for _ in range(2)],
        Segments.of([size], [0]),
        1,
    )
    yield _timed(
        "distinct, all equal", device, [np.full(size, 7, np.int64)], Segments.of([size], [0]), 1
    )
