"""`collective.ops.gpu.update` in NumPy, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.occurrences import Occurrences
from collective.ops.gpu.reference.sums import row_sums
from collective.ops.gpu.rules import (
    SGD,
    Adagrad,
    Adam,
    CenteredRMSProp,
    Ftrl,
    Momentum,
    RMSProp,
    RowWiseAdagrad,
    Rule,
)
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.update import Table


def applied(
    rule: Rule, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Applies `rule` to weights [R, D] and slots, all float64."""
    rate = rule.rate
    if isinstance(rule, SGD):
        return w - rate * g, []
    if isinstance(rule, Momentum):
        m = rule.momentum * slots[0] + g
        return w - rate * (g + rule.momentum * m if rule.nesterov else m), [m]
    if isinstance(rule, Adagrad):
        a = slots[0] + g * g
        return w - rate * g / (np.sqrt(a) + rule.epsilon), [a]
    if isinstance(rule, RowWiseAdagrad):
        a = slots[0] + (g * g).mean(1, keepdims=True)
        return w - rate * g / (np.sqrt(a) + rule.epsilon), [a]
    if isinstance(rule, Adam):
        m = rule.beta1 * slots[0] + (1 - rule.beta1) * g
        v = rule.beta2 * slots[1] + (1 - rule.beta2) * g * g
        return w - rule.corrected_rate() * m / (np.sqrt(v) + rule.epsilon), [m, v]
    if isinstance(rule, Ftrl):
        a, p = slots[0] + g * g, -rule.power
        linear = slots[1] + g + 2 * rule.shrinkage * w - (a**p - slots[0] ** p) / rate * w
        return (np.clip(linear, -rule.l1, rule.l1) - linear) / (a**p / rate + 2 * rule.l2), [
            a,
            linear,
        ]
    assert isinstance(rule, RMSProp)
    s, rest = rule.decay * slots[0] + (1 - rule.decay) * g * g, []
    center: np.ndarray | float = 0.0
    if isinstance(rule, CenteredRMSProp):
        rest = [rule.decay * slots[2] + (1 - rule.decay) * g]
        center = rest[0] ** 2
    m = rule.momentum * slots[1] + rate * g / np.sqrt(s + rule.epsilon - center)
    return w - m, [s, m, *rest]


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
            weights, slots = applied(
                rule,
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
