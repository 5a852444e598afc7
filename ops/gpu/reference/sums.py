"""`collective.ops.gpu.sums` in NumPy. Rows are given as matrices instead of `Rows`, and sums are
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.occurrences import Occurrences
from collective.ops.gpu.segments import Segments


def row_sums(
    gradients: Sequence[np.ndarray],
    occurrences: Occurrences,
    segments: Segments,
    dims: Sequence[int],
    terms: np.ndarray | None = None,
    scale: float = 1.0,
    along: np.ndarray | None = None,
    own: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Sums gradients by row, float64 [U_m, D_m] for each segment; `gradients` and `own` are float32
    matrices.
    """
    firsts = np.concatenate([[0], np.cumsum([len(array) for array in gradients])])
    sums = []
    for m, section in enumerate(segments.sections):
        first, end = segments.offsets[m], segments.offsets[m + 1]
        found = np.zeros((end - first, dims[section]))
        of = np.repeat(np.arange(end - first), np.diff(occurrences.offsets[first : end + 1]))
        k = occurrences.order[occurrences.offsets[first] : occurrences.offsets[end]]
        numbers, factors = (
            (k, np.ones(len(k)))
            if terms is None
            else (
                terms[k, 0],
                np.ascontiguousarray(terms[k, 1]).view(np.float32).astype(np.float64),
            )
        )
        run = np.searchsorted(firsts, numbers, side="right") - 1
        with np.errstate(invalid="ignore", over="ignore"):
            for r in np.unique(run):
                at = run == r
                np.add.at(
                    found,
                    of[at],
                    factors[at, None] * gradients[r][numbers[at] - firsts[r]].astype(np.float64),
                )
            if along is not None and own is not None:
                share = np.bincount(of, along[k].astype(np.float64), len(found))
                found[share != 0] += share[share != 0, None] * own[m][share != 0]
        sums.append(found * np.float64(np.float32(scale)))
    return sums


def sum_rows(
    gradients: Sequence[np.ndarray],
    occurrences: Occurrences,
    segments: Segments,
    dims: Sequence[int],
    workspace: Any = None,
    terms: np.ndarray | None = None,
    scale: float = 1.0,
    along: np.ndarray | None = None,
    own: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """See `collective.ops.gpu.sums.sum_rows`."""
    sums = row_sums(gradients, occurrences, segments, dims, terms, scale, along, own)
    with np.errstate(over="ignore", invalid="ignore"):
        flat = np.concatenate([array.reshape(-1) for array in sums]) if sums else np.zeros(0)
        return flat.astype(np.float32)
