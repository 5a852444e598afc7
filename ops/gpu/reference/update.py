"""`collective.ops.gpu.update` in NumPy, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.occurrences import Occurrences
from collective.ops.gpu.reference.sums import row_sums
from collective.ops.gpu.rules import Adam, Rule
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.update import Table


def update(
    rule: Rule,
    tables: Sequence[Table],
    rows: np.ndarray,
    segments: Segments,
    gradients: Sequence[np.ndarray],
    occurrences: Occurrences,
    workspace: Any = None,
    terms: np.ndarray | None = None,
    bounds: Sequence[float] | None = None,
) -> None:
    """See `collective.ops.gpu.update.update`."""
    dims = [table.weights.shape[1] for table in tables]
    sums = row_sums(gradients, occurrences, segments, dims, terms)
    occurs = np.diff(occurrences.offsets) > 0
    for t, table in enumerate(tables):
        seen, wanted = [np.zeros(0, np.int64)], [np.zeros((0, dims[t]))]
        for m in np.flatnonzero(segments.sections == t):
            part = slice(segments.offsets[m], segments.offsets[m + 1])
            kept = occurs[part] & (rows[part] >= 0) & (rows[part] < len(table.weights))
            seen.append(rows[part][kept])
            wanted.append(sums[m][kept])
        touched, gradient = np.concatenate(seen), np.concatenate(wanted)
        if isinstance(rule, Adam) and not rule.lazy:
            whole = np.zeros(table.weights.shape)
            whole[touched] = gradient
            touched, gradient = np.arange(len(whole)), whole
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            weights, slots = rule.applied(
                table.weights[touched].astype(np.float64),
                gradient,
                [slot[touched].astype(np.float64) for slot in table.slots],
            )
            table.weights[touched] = weights
            if bounds is not None:
                with_gradient = np.concatenate(seen)
                table.weights[with_gradient] = np.clip(
                    table.weights[with_gradient], -bounds[t], bounds[t]
                )
            for slot, made in zip(table.slots, slots):
                slot[touched] = made
