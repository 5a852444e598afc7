"""Combines the ranks' values of variables that were made eagerly, outside of any call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.ops.graph.sessions import run_unpatched, session_before_scripts
from collective.tables.table import is_movable


def make_equal(variables: Sequence[Any]) -> None:
    """Gives every rank rank 0's values of `variables`.

    Every rank calls it with the same variables, made eagerly and of the same shapes. Those that
    don't hold numbers are left unchanged.
    """
    movable = [v for v in variables if is_movable(v)]
    values = _exchanged([v.numpy() for v in movable], collectives.broadcast)
    for variable, value in zip(movable, values):
        variable.assign(value)


def sums(name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the sums over the ranks of `arrays`, each of its own type.

    Every rank calls it with arrays of the same shapes and types.

    Args:
        name: says what they are, for messages.
        arrays: numbers of any shape.

    Raises:
        ValueError: another rank's have other shapes or types.
        RankError: another rank does something else.
    """
    said = barrier.exchange(
        None, f"the sum of {name}", {"arrays": [f"{x.dtype} {list(x.shape)}" for x in arrays]}
    )
    for rank, each in enumerate(said):
        if each["arrays"] != said[0]["arrays"]:
            raise ValueError(
                f"The sum of {name}: rank 0 has {said[0]['arrays']}, rank {rank} "
                f"{each['arrays']}. Make the same on all ranks."
            )
    # Of one rank by the other: numbers of types that no sum over ranks is made of.
    return [sum(parts[1:], parts[0]) for parts in (list(x) for x in _exchanged(arrays, _gathered))]


@contextlib.contextmanager
def of_all_ranks(name: str, states: Sequence[Any]) -> Iterator[None]:
    """Inside, variables that ranks add up have their sums; afterwards each rank's own values again.

    Those with the aggregation MEAN have the mean. Every rank enters it with the same ones.

    Args:
        name: says what they are, for messages.
        states: variables that were made eagerly.

    Raises:
        ValueError: another rank has others.
        RankError: another rank does something else.
    """
    own = [v.numpy() for v in states]
    for variable, total in zip(states, sums(name, own)):
        is_mean = variable.aggregation == tf.VariableAggregation.MEAN
        variable.assign(total / collectives.size() if is_mean else total)
    try:
        yield
    finally:
        for variable, value in zip(states, own):
            variable.assign(value)


def _gathered(x: tf.Tensor, name: str) -> tf.Tensor:
    return collectives.allgather(x[None], name, 0)


def _exchanged(
    arrays: Sequence[np.ndarray], exchange: Callable[[tf.Tensor, str], tf.Tensor]
) -> list[np.ndarray]:
    """Returns what a collective makes of the ranks' arrays."""
    if not arrays:
        return []
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        given = [tf.placeholder(x.dtype, x.shape) for x in arrays]
        results = [exchange(x, collectives.unique_name("eager/values")) for x in given]
        with session_before_scripts() as session:
            values: list[np.ndarray] = run_unpatched(session, results, dict(zip(given, arrays)))
    return values
