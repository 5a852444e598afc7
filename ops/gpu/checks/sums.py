"""Checks and measurements of `collective.ops.gpu.sums`, and inputs for similar kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu import sums as kernels
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import on, values
from collective.ops.gpu.device import Device
from collective.ops.gpu.occurrences import Occurrences, occurrences
from collective.ops.gpu.reference import occurrences as reference_occurrences
from collective.ops.gpu.reference import sums as reference
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sums import Rows
from collective.ops.gpu.workspace import Workspace

DIMS = (1, 3, 4, 16, 100, 128, 1024)
TOLERANCE = 2e-6


class Case(NamedTuple):
    """Holds gradients of rows, for the device and for the reference.

    Attributes:
        segments, dims: the segments and dimensions of U rows.
        numbers: [K] int32, the row of each occurrence.
        terms: [K, 2] uint32 or None.
        gradients: one float32 matrix for each section.
    """

    segments: Segments
    dims: list[int]
    numbers: np.ndarray
    terms: np.ndarray | None
    gradients: list[np.ndarray]

    def there(self, device: Device, workspace: Workspace) -> tuple[Rows, Occurrences, Any]:
        """Returns (rows, occurrences with terms, what keeps the arrays alive) on the device."""
        arrays = [on(device, array) for array in self.gradients]
        terms = None if self.terms is None else on(device, self.terms)
        numbers, keys = on(device, self.numbers), self.segments.keys
        return (
            Rows.of(arrays, device),
            occurrences(numbers, keys, workspace, terms=terms),
            (arrays, terms),
        )

    def here(self) -> tuple[list[np.ndarray], Occurrences]:
        """Returns (gradients, occurrences) for the reference."""
        found = reference_occurrences.occurrences(self.numbers, self.segments.keys)
        return self.gradients, found


def case(
    lengths: list[int],
    dims: list[int],
    each: list[int],
    with_terms: bool,
    finite: bool,
    rng: np.random.Generator,
) -> Case:
    """Draws sections with `lengths` rows and `each` occurrences, one row of which is frequent."""
    segments = Segments.of(lengths, list(range(len(lengths))))
    numbers, rows, gradients, first = [], [], [], 0
    for s, count in enumerate(each):
        drawn = rng.integers(0, lengths[s], count)
        drawn[rng.random(count) < 0.3] = lengths[s] // 2
        numbers.append(segments.offsets[s] + drawn)
        made = rng.standard_normal((count, dims[s])).astype(np.float32)
        gradients.append(made if finite else values((count, dims[s]), rng))
        rows.append(first + rng.integers(0, count, count))
        first += count
    terms = None
    if with_terms:
        factors = rng.standard_normal(first).astype(np.float32)
        terms = np.stack([np.concatenate(rows).astype(np.uint32), factors.view(np.uint32)], 1)
    return Case(segments, dims, np.concatenate(numbers).astype(np.int32), terms, gradients)


def assert_close(got: np.ndarray, wanted: np.ndarray, tolerance: float, what: str) -> None:
    """Raises AssertionError unless finite values are close, relative to their size, and others are
    equal.
    """
    finite = wanted[np.isfinite(wanted)]
    size = float(np.max(np.abs(finite))) if finite.size else 1.0
    np.testing.assert_allclose(got, wanted, tolerance, tolerance * min(size, 100.0), err_msg=what)


def _agree(device: Device, one: Case, workspace: Workspace, scale: float, what: str) -> None:
    rows, found, _alive = one.there(device, workspace)
    got = device.download(
        kernels.sum_rows(rows, found, one.segments, one.dims, workspace, scale=scale)
    )
    gradients, known = one.here()
    wanted = reference.sum_rows(gradients, known, one.segments, one.dims, None, one.terms, scale)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    assert_close(got, wanted, TOLERANCE, what)


def one_dimension(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Sums rows of every dimension, with and without terms, rare and frequent ones."""
    workspace = Workspace(device)
    for dim in DIMS:
        for with_terms in (False, True):
            size = max(min(scale.keys, 2**20) // 8 // (dim + 8), 3)
            one = case([size], [dim], [2 * size + 900 // dim], with_terms, True, rng)
            _agree(device, one, workspace, 0.25, f"dimension {dim}, terms: {with_terms}")


def many_sections(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Sums sections of several dimensions in one launch; one of them is empty and one has a single
    row.
    """
    workspace = Workspace(device)
    dims = [16, 4, 8, 3, 128]
    for with_terms in (False, True):
        one = case([40, 1, 1, 30, 3], dims, [100, 700, 0, 90, 1500], with_terms, True, rng)
        _agree(device, one, workspace, 1.0, f"terms: {with_terms}")


def not_finite(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Keeps infinities and NaNs in the sums that they belong to."""
    one = case([300], [4], [350], False, False, rng)
    workspace = Workspace(device)
    rows, found, _alive = one.there(device, workspace)
    got = device.download(kernels.sum_rows(rows, found, one.segments, one.dims, workspace))
    gradients, known = one.here()
    wanted = reference.sum_rows(gradients, known, one.segments, one.dims)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))


def all_equal(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Sums occurrences of one row only; the same bits come out again."""
    size = min(scale.keys, 2**20)
    numbers = np.zeros(size, np.int32)
    made = rng.integers(-9, 9, (size, 4)).astype(np.float32)
    one = Case(Segments.of([2], [0]), [4], numbers, None, [made])
    workspace = Workspace(device)
    wanted = [made.sum(0, np.float64), np.zeros(4)]
    for _ in range(2):
        rows, found, _alive = one.there(device, workspace)
        got = device.download(kernels.sum_rows(rows, found, one.segments, one.dims, workspace))
        np.testing.assert_array_equal(got.reshape(2, 4), wanted)


def edges(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Sums rows with the most occurrences that aren't cut, and with one more; an infinite factor
    of a missing row has no effect.
    """
    numbers = rng.permutation(np.repeat(np.arange(5, dtype=np.int32), [64, 65, 512, 513, 1]))
    made = rng.integers(-9, 9, (len(numbers), 3)).astype(np.float32)
    factors = np.ones(len(numbers), np.float32)
    terms = np.stack([np.arange(len(numbers), dtype=np.uint32), factors.view(np.uint32)], 1)
    known = reference_occurrences.occurrences(numbers, 5)
    one = Case(Segments.of([5], [0]), [3], numbers, None, [made])
    wanted = reference.sum_rows([made], known, one.segments, [3]).reshape(5, 3)
    _agree(device, one, Workspace(device), 1.0, "edges")
    absent = np.flatnonzero(numbers == 4)
    terms[absent] = len(numbers), np.array([np.inf], np.float32).view(np.uint32)[0]
    workspace = Workspace(device)
    rows, found, _alive = one._replace(terms=terms).there(device, workspace)
    got = device.download(kernels.sum_rows(rows, found, one.segments, [3], workspace))
    wanted[4] = 0
    np.testing.assert_array_equal(got.reshape(5, 3), wanted)


CHECKS = (one_dimension, many_sections, not_finite, all_equal, edges)


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures gradients of samples, summed by row; each sample occurs about four times."""
    for dim in (16, 128):
        size = max(scale.measured_bytes // 8 // (4 * dim), 8)
        gradients: list[Any] = [device.zeros((size, dim), np.float32) for _ in range(2)]
        workspace = Workspace(device)
        found = occurrences(
            on(device, rng.integers(0, size // 4, size, np.int32)), size // 4, workspace
        )
        segments = Segments.of([size // 4], [0])

        def run(
            array: Any, found: Occurrences, segments: Segments, dim: int, workspace: Workspace
        ) -> object:
            return kernels.sum_rows(Rows.of([array], device), found, segments, [dim], workspace)

        yield Measurement(
            "sum by row",
            [partial(run, array, found, segments, dim, workspace) for array in gradients],
            size * (4 * dim + 4) + size // 4 * (4 * dim + 4),
            dim,
            "float32",
            size,
        )
