"""Writes the rules of `collective.train` down once more, row by row in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Callable

import numpy as np

State = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Reference:
    """Describes an optimizer's rule.

    Attributes:
        start: returns the slots of a row of D elements.
        row: updates (a row, its slots) by (its gradient, the number of the step from 1, True if
            the gradient is of this row).
        all_rows: rows without a gradient change, too.
    """

    start: Callable[[int], State]
    row: Callable[[np.ndarray, State, np.ndarray, int, bool], None]
    all_rows: bool = False


def trained(
    reference: Reference, start: np.ndarray, batches: Iterable[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, list[State]]:
    """Returns the rows [V, D] and their slots after updates by batches of (ids [K], [K, D])."""
    rows = start.astype(np.float64)
    states = [reference.start(rows.shape[1]) for _ in rows]
    for step, (ids, gradients) in enumerate(batches, 1):
        sums: dict[int, np.ndarray] = {}
        for row, gradient in zip(ids.tolist(), gradients.astype(np.float64)):
            sums[row] = sums.get(row, 0.0) + gradient
        for row, state in enumerate(states):
            if row in sums or reference.all_rows:
                gradient = sums.get(row, np.zeros(rows.shape[1]))
                reference.row(rows[row], state, gradient, step, row in sums)
    return rows, states


def row_wise_adagrad(rate: float, initial: float, epsilon: float) -> Reference:
    def start(dim: int) -> State:
        return {"accumulator": np.array([initial])}

    def row(w: np.ndarray, state: State, g: np.ndarray, step: int, present: bool) -> None:
        state["accumulator"] += (g * g).sum() / len(g)
        w -= rate * g / (np.sqrt(state["accumulator"]) + epsilon)

    return Reference(start, row)
