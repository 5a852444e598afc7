"""Checks that kernels are right, and measures how fast they are; `python -m
collective.ops.gpu_check` runs all of it.

A kernel family has a module here, named in `FAMILIES`, and so has the `step` that all of them make.
Each module has

    CHECKS          functions (device, scale, rng) that raise AssertionError if a kernel and its
    reference differ
    measurements    a function (device, scale, rng) that makes inputs and yields what is to be timed
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Callable, NamedTuple, Protocol, cast

import numpy as np

from collective.ops.gpu.device import Device

FAMILIES = (
    "distinct",
    "partition",
    "gather",
    "occurrences",
    "sums",
    "pool",
    "update",
    "hash_table",
    "reserved",
    "step",
)


class Scale(NamedTuple):
    """Says how large the inputs are.

    Attributes:
        keys: the most keys that a check uses.
        elements: the number of elements of the largest table that a check uses.
        measured_keys: the number of keys in one measurement.
        measured_bytes: the size of a measurement's tables and buffers: several times the L2.
    """

    keys: int
    elements: int
    measured_keys: int
    measured_bytes: int


FULL = Scale(keys=2**24, elements=2**31 + 2**20, measured_keys=2**24, measured_bytes=2**32)
FEWEST_KEYS = 1000  # of a check
SMALL = Scale(keys=5000, elements=2**16, measured_keys=3000, measured_bytes=2**16)

Check = Callable[[Device, Scale, np.random.Generator], None]


class Measurement(NamedTuple):
    """Describes what is timed for one row of the report.

    Attributes:
        kernel: the kernel, and its input.
        runs: functions that are timed in turn: the same with different inputs.
        bytes: the useful bytes that one run must move.
        dim, dtype: those of the rows, if there are rows.
        keys: the number of keys in one run.
        waits: whether the host waits for the device in each run, which counts.
    """

    kernel: str
    runs: Sequence[Callable[[], object]]
    bytes: int
    dim: int | None = None
    dtype: str | None = None
    keys: int | None = None
    waits: bool = False


class Family(Protocol):
    """A module with the checks and the measurements of a kernel family."""

    CHECKS: Sequence[Check]

    def measurements(
        self, device: Device, scale: Scale, rng: np.random.Generator
    ) -> Iterator[Measurement]:
        """Yields what is to be timed; its inputs are dropped before the next ones are made."""


def family(name: str) -> Family:
    """Returns the module of one of `FAMILIES`."""
    return cast(Family, importlib.import_module(f"{__name__}.{name}"))
