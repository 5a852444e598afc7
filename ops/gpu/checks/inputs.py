"""Makes inputs that are hard for kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collective.ops.gpu.device import Device
from collective.ops.gpu.segments import Segments

EXTREME = np.array(
    [-(2**63), 2**63 - 1, 0, -1, 1, 2**32, -(2**32), 2**31 - 1, 2**63 - 2**32], np.int64
)
SPECIAL = np.array(
    [
        np.nan,
        np.inf,
        -np.inf,
        -0.0,
        0.0,
        1e-45,
        6e-8,
        65504.0,
        65520.0,
        3.4e38,
        -1e38,
        1 + 2**-9,
        1 + 3 * 2**-9,
    ],
    np.float32,
)


def key_cases(most: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and int64 keys: none, one, and up to `most` of them."""
    yield "none", np.zeros(0, np.int64)
    yield "one", np.array([-7], np.int64)
    for size in {2047, 2048, 2049, most}:
        yield f"random {size}", rng.integers(-(2**63), 2**63 - 1, size, np.int64)
    yield "all equal", np.full(most, np.iinfo(np.int64).min)
    yield "all distinct", rng.permutation(most).astype(np.int64)
    yield "few", rng.integers(0, 50, most, np.int64)
    yield "half of them new", rng.integers(0, most, most, np.int64)
    yield "skewed", np.minimum(rng.zipf(1.2, most), 2**40).astype(np.int64)
    yield "extreme", rng.choice(EXTREME, most)
    yield "equal in their low bits", rng.integers(-(2**20), 2**20, most, np.int64) * 2**40


def segment_cases(keys: int, sections: int, rng: np.random.Generator) -> Iterator[Segments]:
    """Yields one segment; one for each section; many in no order, some of them empty."""
    yield Segments.of([keys], [sections - 1])
    cuts = np.sort(rng.integers(0, keys + 1, sections - 1))
    yield Segments.of(np.diff([0, *cuts, keys]), list(range(sections)))
    cuts = np.sort(rng.integers(0, keys + 1, 11))
    yield Segments.of(np.diff([0, *cuts, keys]), rng.integers(0, sections, 12))


def values(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws float32 values, normally distributed, with some among them that are not finite."""
    drawn = rng.standard_normal(shape).astype(np.float32)
    special = rng.random(shape) < 0.1
    drawn[special] = rng.choice(SPECIAL, int(special.sum()))
    return drawn


def on(device: Device, array: np.ndarray) -> object:
    """Copies `array` to the device."""
    there = device.empty(array.shape, array.dtype)
    device.upload(np.ascontiguousarray(array), there)
    return there


def assert_same(device: Device, got: object, wanted: np.ndarray, what: str) -> None:
    """Raises AssertionError unless an array of the device has the type, the shape and all elements
    of another.
    """
    here = device.download(got)
    assert here.dtype == wanted.dtype and here.shape == wanted.shape, (
        f"{what}: {here.dtype} {here.shape}, wanted {wanted.dtype} {wanted.shape}"
    )
    np.testing.assert_array_equal(here, wanted, what)
