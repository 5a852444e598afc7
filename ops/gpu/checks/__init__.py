"""Checks that kernels are right, and measures how fast they are; `python -m
collective.ops.gpu_check` runs all of it.

A kernel family has a module here, named in `FAMILIES`, and so has the `step` that all of them make,
with

    CHECKS          functions (device, scale, rng) that raise AssertionError where a kernel and its
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
    """Says how large inputs are.

    Attributes:
        keys: the most keys that a check uses.
        elements: of the largest table that a check uses.
        measured_keys: of one measurement.
        measured_bytes: of the tables and buffers of a measurement: several times the L2.
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
    """Is timed for one row of the report.

    Attributes:
        kernel: which, and on what.
        runs: what is timed, by turns: the same with other inputs.
        bytes: what one of them must move: useful bytes only.
        dim, dtype: of rows, where there are rows.
        keys: how many one of them works on.
        waits: the host waits for the device in each, and that counts.
    """

    kernel: str
    runs: Sequence[Callable[[], object]]
    bytes: int
    dim: int | None = None
    dtype: str | None = None
    keys: int | None = None
    waits: bool = False


class Family(Protocol):
    """Has the checks and the measurements of a kernel family: a module."""

    CHECKS: Sequence[Check]

    def measurements(
        self, device: Device, scale: Scale, rng: np.random.Generator
    ) -> Iterator[Measurement]:
        """Yields what is to be timed; the inputs of one are dropped before the next is made."""


def family(name: str) -> Family:
    """Returns the module of one of `FAMILIES`."""
    return cast(Family, importlib.import_module(f"{__name__}.{name}"))
