"""`collective.ops.gpu.pool` in NumPy, in float64. Rows are given as one float32 matrix for each of
the `Rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.pool import MEAN, SUM, Ids, Lookup, Terms


def _bags(
    lookups: Sequence[Lookup], rows: Sequence[np.ndarray], ids: Ids
) -> Iterator[tuple[int, int, Lookup, slice, np.ndarray, np.ndarray, np.ndarray, float]]:
    """Yields for each sample (the look-up's number, the sample's number, the look-up, its ids,
    their rows, weights, clips, divisor).
    """
    number = 0
    for m, lookup in enumerate(lookups):
        matrix = rows[lookup.source]
        for _ in range(lookup.samples):
            part = slice(ids.offsets[number], ids.offsets[number + 1])
            at = ids.positions[part]
            inside = (at >= 0) & (at < len(matrix))
            found = np.zeros((len(at), lookup.dim))
            found[inside] = matrix[at[inside]]
            weights = ids.weights[part].astype(np.float64) if lookup.weighted else np.ones(len(at))
            clips = np.ones(len(at))
            if lookup.max_norm > 0:
                clips = lookup.max_norm / np.maximum(
                    np.sqrt((found * found).sum(1)), lookup.max_norm
                )
            total = 1.0
            if lookup.combiner != SUM:
                total = weights.sum() if lookup.combiner == MEAN else np.sqrt((weights**2).sum())
            yield m, number, lookup, part, found, weights, clips, float(total)
            number += 1


def pool(
    lookups: Sequence[Lookup],
    rows: Sequence[np.ndarray],
    ids: Ids,
    workspace: Any = None,
) -> list[np.ndarray]:
    """See `collective.ops.gpu.pool.pool`."""
    pooled: list[list[np.ndarray]] = [[] for _ in lookups]
    with np.errstate(invalid="ignore", over="ignore"):
        for m, _, lookup, _, found, weights, clips, divisor in _bags(lookups, rows, ids):
            total = ((weights * clips)[:, None] * found).sum(0)
            pooled[m].append(total / divisor if divisor != 0 else np.zeros(lookup.dim))
        return [
            np.array(made, np.float32).reshape(-1, lookup.dim)
            for made, lookup in zip(pooled, lookups)
        ]


def pool_terms(
    lookups: Sequence[Lookup],
    rows: Sequence[np.ndarray],
    ids: Ids,
    gradients: Sequence[np.ndarray],
    workspace: Any = None,
    of_weights: bool = False,
) -> Terms:
    """Computes `collective.ops.gpu.pool.pool_terms`; `gradients`: float32, one for each look-up."""
    size, first = len(ids.positions), np.cumsum([0, *(lookup.samples for lookup in lookups)])
    samples, factors = np.zeros(size, np.uint32), np.zeros(size, np.float32)
    along, made = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for m, number, lookup, part, found, weights, clips, divisor in _bags(lookups, rows, ids):
        products = found @ gradients[m][number - first[m]].astype(np.float64)
        samples[part] = number
        factor = weights * clips / divisor if divisor != 0 else np.zeros(len(weights))
        factors[part] = factor
        if lookup.max_norm > 0:
            squares = (found * found).sum(1)
            clipped = (squares > 0) & (np.sqrt(squares) >= lookup.max_norm)
            along[part] = np.where(clipped, -factor * products / np.where(clipped, squares, 1), 0)
        if lookup.weighted:
            products = products * clips
            if lookup.combiner == SUM:
                made[part] = products
            elif divisor != 0:
                share = 1 / divisor if lookup.combiner == MEAN else weights / divisor**2
                made[part] = (products - share * (weights * products).sum()) / divisor
    return Terms(
        np.stack([samples, factors.view(np.uint32)], 1),
        along if any(one.max_norm > 0 for one in lookups) else None,
        made if of_weights else None,
    )
