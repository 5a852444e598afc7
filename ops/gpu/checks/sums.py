"""Checks and measurements of `collective.ops.gpu.sums`, and inputs for what is like it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu import sums as kernels
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import on, values
from collective.ops.gpu.device import Device
from collective.ops.gpu.elements import (
    ELEMENTS,
    FLOAT16,
    FLOAT32,
    Element,
    from_float32,
    to_float32,
)
from collective.ops.gpu.occurrences import Occurrences, occurrences
from collective.ops.gpu.reference import occurrences as reference_occurrences
from collective.ops.gpu.reference import sums as reference
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sums import Rows
from collective.ops.gpu.workspace import Workspace

DIMS = (1, 3, 4, 16, 100, 128, 1024)
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}


class Case(NamedTuple):
    """Gradients of rows, for the device and for the reference.

    Attributes:
        segments, dims: of U rows.
        numbers: [K] int32, the row of each occurrence.
        terms: [K, 2] uint32 or None.
        gradients: one matrix for each section, of `element`.
        element: what they are of.
    """

    segments: Segments
    dims: list[int]
    numbers: np.ndarray
    terms: np.ndarray | None
    gradients: list[np.ndarray]
    element: Element

    def there(self, device: Device, workspace: Workspace) -> tuple[Rows, Occurrences, Any, Any]:
        """(rows, occurrences, terms, what keeps the arrays alive) on the device."""
        arrays = [on(device, array) for array in self.gradients]
        return (
            Rows.of(arrays, self.element, device),
            occurrences(on(device, self.numbers), self.segments.keys, workspace),
            None if self.terms is None else on(device, self.terms),
            arrays,
        )

    def here(self) -> tuple[list[np.ndarray], Occurrences]:
        """(gradients as float32, occurrences) for the reference."""
        return (
            [to_float32(array, self.element) for array in self.gradients],
            reference_occurrences.occurrences(self.numbers, self.segments.keys),
        )


def case(
    lengths: list[int],
    dims: list[int],
    each: list[int],
    element: Element,
    with_terms: bool,
    finite: bool,
    rng: np.random.Generator,
) -> Case:
    """Of sections with `lengths` rows and `each` occurrences, one row of which is frequent."""
    segments = Segments.of(lengths, list(range(len(lengths))))
    numbers, rows, gradients, first = [], [], [], 0
    for s, count in enumerate(each):
        drawn = rng.integers(0, lengths[s], count)
        drawn[rng.random(count) < 0.3] = lengths[s] // 2
        numbers.append(segments.offsets[s] + drawn)
        made = rng.standard_normal((count, dims[s])).astype(np.float32)
        gradients.append(
            from_float32(made, element) if finite else values((count, dims[s]), element, rng)
        )
        rows.append(first + rng.integers(0, count, count))
        first += count
    terms = None
    if with_terms:
        factors = rng.standard_normal(first).astype(np.float32)
        terms = np.stack([np.concatenate(rows).astype(np.uint32), factors.view(np.uint32)], 1)
    return Case(segments, dims, np.concatenate(numbers).astype(np.int32), terms, gradients, element)


def assert_close(got: np.ndarray, wanted: np.ndarray, tolerance: float, what: str) -> None:
    """Raises AssertionError unless finite values are close to each other's size, and others are
    equal.
    """
    finite = wanted[np.isfinite(wanted)]
    size = float(np.max(np.abs(finite))) if finite.size else 1.0
    np.testing.assert_allclose(got, wanted, tolerance, tolerance * min(size, 100.0), err_msg=what)


def _agree(
    device: Device, one: Case, element: Element, workspace: Workspace, scale: float, what: str
) -> None:
    rows, found, terms, _alive = one.there(device, workspace)
    got = device.download(
        kernels.sum_rows(rows, found, one.segments, one.dims, element, workspace, terms, scale)
    )
    gradients, known = one.here()
    wanted = reference.sum_rows(
        gradients, known, one.segments, one.dims, element, None, one.terms, scale
    )
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    assert_close(
        to_float32(got, element), to_float32(wanted, element), TOLERANCE[element.name], what
    )


def one_dimension(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Every dimension and type, with and without terms, rows rare and frequent."""
    workspace = Workspace(device)
    for number, dim in enumerate(DIMS):
        for element in ELEMENTS:
            size = max(min(scale.keys, 2**20) // 8 // (dim + 8), 3)
            one = case([size], [dim], [2 * size + 900 // dim], element, number % 2 == 0, True, rng)
            _agree(
                device, one, ELEMENTS[number % 3], workspace, 0.25, f"{element}, dimension {dim}"
            )


def many_sections(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Sections of several dimensions in one launch, of which one is empty and one has a single row."""
    workspace = Workspace(device)
    for with_terms in (False, True):
        one = case(
            [40, 1, 1, 30, 3],
            [16, 4, 8, 3, 128],
            [100, 700, 0, 90, 1500],
            FLOAT32,
            with_terms,
            True,
            rng,
        )
        _agree(device, one, FLOAT32, workspace, 1.0, f"terms: {with_terms}")


def not_finite(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Infinities and NaNs stay in the sums that they belong to."""
    workspace = Workspace(device)
    for element in ELEMENTS:
        one = case([300], [4], [350], element, False, False, rng)
        rows, found, _, _alive = one.there(device, workspace)
        got = device.download(
            kernels.sum_rows(rows, found, one.segments, one.dims, FLOAT32, workspace)
        )
        gradients, known = one.here()
        wanted = reference.sum_rows(gradients, known, one.segments, one.dims, FLOAT32)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))


def all_equal(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """All occurrences are of one row; the same bits come out again."""
    size = min(scale.keys, 2**20)
    numbers = np.zeros(size, np.int32)
    made = rng.integers(-9, 9, (size, 4)).astype(np.float16)
    one = Case(Segments.of([2], [0]), [4], numbers, None, [made], FLOAT16)
    workspace = Workspace(device)
    for _ in range(2):
        rows, found, _, _alive = one.there(device, workspace)
        got = device.download(
            kernels.sum_rows(rows, found, one.segments, one.dims, FLOAT32, workspace)
        )
        np.testing.assert_array_equal(
            got.reshape(2, 4), [made.astype(np.float32).sum(0, np.float64), np.zeros(4)]
        )


def edges(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Rows that occur as often as is not cut, and once more; an infinite factor of a row that isn't
    there makes nothing.
    """
    numbers = rng.permutation(np.repeat(np.arange(5, dtype=np.int32), [64, 65, 512, 513, 1]))
    made = rng.integers(-9, 9, (len(numbers), 3)).astype(np.float32)
    terms = np.stack(
        [
            np.arange(len(numbers), dtype=np.uint32),
            np.ones(len(numbers), np.float32).view(np.uint32),
        ],
        1,
    )
    known = reference_occurrences.occurrences(numbers, 5)
    one = Case(Segments.of([5], [0]), [3], numbers, None, [made], FLOAT32)
    wanted = reference.sum_rows([made], known, one.segments, [3], FLOAT32).reshape(5, 3)
    _agree(device, one, FLOAT32, Workspace(device), 1.0, "edges")
    absent = np.flatnonzero(numbers == 4)
    terms[absent] = len(numbers), np.array([np.inf], np.float32).view(np.uint32)[0]
    rows, found, there, _alive = one._replace(terms=terms).there(
        device, workspace := Workspace(device)
    )
    got = device.download(
        kernels.sum_rows(rows, found, one.segments, [3], FLOAT32, workspace, there)
    ).reshape(5, 3)
    wanted[4] = 0
    np.testing.assert_array_equal(got, wanted)


CHECKS = (one_dimension, many_sections, not_finite, all_equal, edges)


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Gradients of samples, summed by row: each of a quarter of the rows occurs about four times."""
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
            return kernels.sum_rows(
                Rows.of([array], FLOAT32, device), found, segments, [dim], FLOAT32, workspace
            )

        yield Measurement(
            "sum by row",
            [partial(run, array, found, segments, dim, workspace) for array in gradients],
            size * (4 * dim + 4) + size // 4 * (4 * dim + 4),
            dim,
            "float32",
            size,
        )
