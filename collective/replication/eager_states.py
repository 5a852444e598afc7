"""Combines the ranks' states of metrics that eager code has made.

A `tf.function` that updates a metric shows what its states are, when it is traced: sums over
records, largest or smallest values (`metric_states`). Without a function nothing shows it: there a
metric of Keras has sums, and of another one that assigns its states nothing is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination.functions import eager_values
from collective.ops.communication import collectives
from collective.ops.communication.fused_reductions import Reduction
from collective.replication import metric_states

_COMBINED: dict[Reduction, eager_values.Combined] = {
    Reduction.SUM: eager_values.added,
    Reduction.MAX: np.maximum.reduce,
    Reduction.MIN: np.minimum.reduce,
}
# How ranks' states become one whose aggregation the script has chosen.
_MEAN = tf.VariableAggregation.MEAN
_AGGREGATED = (tf.VariableAggregation.SUM, _MEAN)


@dataclasses.dataclass
class EagerState:
    """Describes the state of a metric that eager code has made.

    Attributes:
        is_of_keras: whether Keras itself updates it: its metrics have sums.
        start: the value that it was made with.
        starts_from_0: whether it was 0 when it was made, or assigned without a function last.
        reductions: what the updates of functions keep of it.
        obstacles: why the ranks' states can't be combined.
        is_updated_together: whether ranks call a function together that updates it.
        is_of_all_ranks: whether the variable has the value of all ranks, for a while.
    """

    is_of_keras: bool
    start: np.ndarray
    starts_from_0: bool
    reductions: set[Reduction] = dataclasses.field(default_factory=set)
    obstacles: list[str] = dataclasses.field(default_factory=list)
    is_updated_together: bool = False
    is_of_all_ranks: bool = False


# The states by the ids of their handles, by which functions capture them.
_states: weakref.WeakValueDictionary[int, EagerState] = weakref.WeakValueDictionary()
# Not empty while states get other values for a while.
_as_they_are: list[bool] = []


def note(metric: Any, variable: Any) -> None:
    """Notes a variable that a metric has made eagerly."""
    with tf.init_scope():
        start = variable.numpy()
    kind = next(kind for kind in type(metric).__mro__ if "update_state" in vars(kind))
    is_of_keras = kind.__module__.partition(".")[0] in ("keras", "tf_keras")
    state = EagerState(is_of_keras, start, _is_zero(start))
    variable._collective_state = state
    _states[id(variable.handle)] = state


def state_of(variable: Any) -> EagerState | None:
    """Returns what is known of a variable; None if it is no metric's.

    By its handle: with mixed precision, a function has another object for it than the metric.
    """
    return _states.get(id(variable.handle))


def to_combine(variables: Sequence[Any]) -> list[Any]:
    """Returns those states of a metric that are each rank's own, if ranks update it together."""
    known = [(v, state_of(v)) for v in variables]
    own = [(v, state) for v, state in known if state is None or not state.is_of_all_ranks]
    is_common = any(state is not None and state.is_updated_together for _, state in own)
    return [v for v, _ in own] if is_common else []


def start_of(variable: Any) -> np.ndarray:
    """Returns the state of a metric that has seen no record."""
    state = state_of(variable)
    return np.zeros_like(variable.numpy()) if state is None else state.start


def note_function(graph: Any, together: bool) -> None:
    """Notes how a function that was traced to its end updates the states of metrics.

    Args:
        graph: the function's.
        together: whether ranks call it together.
    """
    if collectives.size() == 1:
        return
    captured = [(_states[id(x)], inner) for x, inner in graph.captures if id(x) in _states]
    for (state, _), kept in zip(captured, metric_states.kept_inside([x for _, x in captured])):
        state.reductions |= kept.reductions
        state.obstacles += kept.obstacles
        state.is_updated_together |= together and bool(kept.reductions or kept.obstacles)


def assign(original: Any, variable: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a variable's `assign`: notes what eager code assigns to a metric's state.

    Keras resets a metric by it; and so does a metric update itself that no function calls.
    """
    state = state_of(variable)
    if state is not None and not _as_they_are and tf.executing_eagerly():
        state.starts_from_0 = _is_zero(np.asarray(value))
    return original(variable, value, *args, **kwargs)


@contextlib.contextmanager
def as_they_are() -> Iterator[None]:
    """Inside, what is assigned to states doesn't count as their start, nor as an update."""
    _as_they_are.append(True)
    try:
        yield
    finally:
        _as_they_are.pop()


def _combined(whose: str, variable: Any) -> eager_values.Combined:
    """Returns what makes one state of the ranks' states.

    Args:
        whose: the metric, for messages.
        variable: the state.

    Raises:
        NotImplementedError: there is no such thing.
    """
    state = state_of(variable)
    aggregation = variable.aggregation
    if aggregation == _MEAN:
        return eager_values.mean
    reductions = state.reductions if state else set()
    obstacle = metric_states.obstacle_of(reductions, state.obstacles) if state else ""
    if not obstacle and reductions <= {Reduction.SUM}:
        if aggregation not in _AGGREGATED:
            raise NotImplementedError(
                f"{whose} has the state '{variable.name}' with "
                f"aggregation={aggregation.name}: ranks can't combine theirs. Make it with "
                "aggregation=tf.VariableAggregation.SUM (or MEAN)."
            )
        if state and not state.starts_from_0 and not state.is_of_keras:
            obstacle = (
                metric_states.NO_SUM
                if reductions
                else "is assigned without a function, where ranks can't see what it keeps"
            )
    if obstacle:
        raise NotImplementedError(
            f"{whose} has the state '{variable.name}', which {obstacle}: ranks can't "
            f"combine theirs. {metric_states.NEEDS}"
        )
    return _COMBINED[next(iter(reductions), Reduction.SUM)]


@contextlib.contextmanager
def of_all_ranks(name: str, states: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """Inside, the states of metrics are those of all ranks; afterwards each rank has its own again.

    Every rank enters it with the same ones.

    Args:
        name: says what they are, for messages.
        states: (the metric, for messages; its variable).

    Raises:
        NotImplementedError: a state can't be combined.
        ValueError: another rank has others.
        RankError: another rank does something else.
    """
    combined = [_combined(whose, variable) for whose, variable in states]
    variables = [variable for _, variable in states]
    known = [state for variable in variables if (state := state_of(variable))]
    with as_they_are(), eager_values.of_all_ranks(name, variables, combined):
        for state in known:
            state.is_of_all_ranks = True
        try:
            yield
        finally:
            for state in known:
                state.is_of_all_ranks = False


def _is_zero(value: np.ndarray) -> bool:
    return not np.any(value)
