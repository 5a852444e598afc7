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


def persia_adagrad(
    rate: float, initial: float, momentum: float, epsilon: float, shared: bool = False
) -> Reference:
    def start(dim: int) -> State:
        return {"accumulator": np.full(1 if shared else dim, initial)}

    def row(w: np.ndarray, state: State, g: np.ndarray, step: int, present: bool) -> None:
        w -= rate * g / np.sqrt(state["accumulator"] + epsilon)
        squares = (g * g).mean(keepdims=True) if shared else g * g
        state["accumulator"] *= momentum
        state["accumulator"] += squares

    return Reference(start, row)


def adagrad_decay(rate: float, initial: float, every: int, decay: float) -> Reference:
    def start(dim: int) -> State:
        return {"accumulator": np.full(dim, initial), "accumulator_decay_power": np.zeros(1)}

    def row(w: np.ndarray, state: State, g: np.ndarray, step: int, present: bool) -> None:
        if step // every > state["accumulator_decay_power"]:
            state["accumulator"][:] = np.maximum(state["accumulator"] * decay, initial)
            state["accumulator_decay_power"] += 1
        state["accumulator"] += g * g
        w -= rate * g / np.sqrt(state["accumulator"])

    return Reference(start, row)


def adam(
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    lazy: bool,
    decay: float = 0.0,
    decays_by_rate: bool = False,
) -> Reference:
    """Describes Adam, whose weights decay first: by `decay`, or by this times the step's rate."""

    def start(dim: int) -> State:
        return {"m": np.zeros(dim), "v": np.zeros(dim)}

    def row(w: np.ndarray, state: State, g: np.ndarray, step: int, present: bool) -> None:
        corrected = rate * np.sqrt(1 - beta2**step) / (1 - beta1**step)
        if present:
            w -= decay * (corrected if decays_by_rate else 1.0) * w
        state["m"][:] = beta1 * state["m"] + (1 - beta1) * g
        state["v"][:] = beta2 * state["v"] + (1 - beta2) * g * g
        w -= corrected * state["m"] / (np.sqrt(state["v"]) + epsilon)

    return Reference(start, row, all_rows=not lazy)


def rmsprop_of_adam_async(rate: float, beta1: float, beta2: float, epsilon: float) -> Reference:
    def row(w: np.ndarray, state: State, g: np.ndarray, step: int, present: bool) -> None:
        state["v"][:] = beta2 * state["v"] + (1 - beta2) * g * g
        state["m"][:] = beta1 * state["m"] + rate * g / np.sqrt(state["v"] + epsilon)
        w -= state["m"]

    return Reference(adam(0, 0, 0, 0, True).start, row)


def ftrl(
    rate: float,
    power: float,
    l1: float,
    l2: float,
    shrinkage: float,
    beta: float,
    group: bool,
    sees_shrinkage: bool = False,
) -> Reference:
    """Describes FTRL with l1 of a row's norm, or of each element.

    The square that z and w see is that of the gradient, or of the gradient with its shrinkage.
    """

    def start(dim: int) -> State:
        return {"accum": np.full(dim, 0.1), "linear": np.zeros(dim)}

    def row(w: np.ndarray, state: State, g: np.ndarray, step: int, present: bool) -> None:
        n, z = state["accum"], state["linear"]
        shrunk = g + 2 * shrinkage * w
        new_n = n + (shrunk if sees_shrinkage else g) ** 2
        z += shrunk - (new_n**-power - n**-power) / rate * w
        n += g * g
        size = np.full(len(z), np.sqrt((z * z).sum())) if group else np.abs(z)
        divisor = new_n**-power / rate + 2 * l2 + beta / rate
        for i in range(len(w)):
            w[i] = 0 if size[i] <= l1 else -z[i] * (1 - l1 / size[i]) / divisor[i]

    return Reference(start, row)
