"""Checks and measurements of `collective.ops.gpu.partition`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from collective.ops.counting import counted
from collective.ops.gpu import partition as kernels
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import assert_same, key_cases, on, segment_cases
from collective.ops.gpu.device import Device
from collective.ops.gpu.reference import partition as reference
from collective.ops.gpu.segments import DYNAMIC, MOST_RANKS, STATIC, Segments
from collective.ops.gpu.workspace import Workspace

KINDS = (STATIC, DYNAMIC, STATIC, DYNAMIC)


def by_owner(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Partitions any keys, by any segments and numbers of ranks."""
    workspace = Workspace(device)
    for name, keys in key_cases(scale.keys, rng):
        here = on(device, keys)
        for segments, ranks in zip(segment_cases(len(keys), len(KINDS), rng), (1, 3, 8)):
            got = kernels.partition(here, segments, KINDS, ranks, workspace)
            for field, wanted in (
                reference.partition(keys, segments, KINDS, ranks)._asdict().items()
            ):
                assert_same(
                    device,
                    getattr(got, field),
                    wanted,
                    f"{field} of keys {name}, {counted(ranks, 'rank')}",
                )


def many_ranks(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Partitions keys by as many ranks as there can be."""
    ranks = min(MOST_RANKS, scale.keys // 50)
    keys = rng.integers(-(2**63), 2**63 - 1, min(scale.keys, 2**20), np.int64)
    segments = Segments.of([len(keys) // 2, len(keys) - len(keys) // 2], [1, 0])
    got = kernels.partition(on(device, keys), segments, KINDS, ranks, Workspace(device))
    for field, wanted in reference.partition(keys, segments, KINDS, ranks)._asdict().items():
        assert_same(device, getattr(got, field), wanted, field)


def local_rows(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Finds the owner's rows of any keys."""
    workspace = Workspace(device)
    for name, keys in key_cases(scale.keys, rng):
        for segments, ranks in zip(segment_cases(len(keys), len(KINDS), rng), (1, 3, 8)):
            assert_same(
                device,
                kernels.local_rows(on(device, keys), segments, KINDS, ranks, workspace),
                reference.local_rows(keys, segments, KINDS, ranks),
                f"rows of keys {name}, {counted(ranks, 'rank')}",
            )


CHECKS = (by_owner, many_ranks, local_rows)


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures the partition of keys by 8 owners."""
    size, workspace = scale.measured_keys, Workspace(device)
    inputs = [on(device, rng.integers(0, 2**40, size, np.int64)) for _ in range(3)]
    segments = Segments.of([size], [0])
    run = partial(
        kernels.partition, segments=segments, kinds=[STATIC], ranks=8, workspace=workspace
    )
    yield Measurement(
        "partition, 8 ranks", [partial(run, keys) for keys in inputs], 28 * size, keys=size
    )
