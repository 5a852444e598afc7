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

# Makes one array of the ranks' arrays.
Combined = Callable[[Sequence[np.ndarray]], np.ndarray]


def added(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the sum of the ranks' arrays, of their type."""
    total: np.ndarray = sum(arrays[1:], arrays[0])
    return total


def mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean of the ranks' arrays."""
    return added(arrays) / len(arrays)


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
    # Of one rank by the other: numbers of types that no sum over ranks is made of.
    of_ranks = parts(f"the sum of {name}", arrays)
    return [added(parts) for parts in zip(*of_ranks)]


def parts(
    name: str, arrays: Sequence[np.ndarray], other_lengths: bool = False
) -> list[list[np.ndarray]]:
    """Returns each rank's `arrays`, in the order of the ranks.

    Every rank calls it with as many arrays of the same types, and of the same shapes.

    Args:
        name: says what the ranks do; the same on every rank.
        arrays: numbers of any shape.
        other_lengths: whether the first dimensions may differ between ranks.

    Raises:
        ValueError: another rank's have other shapes or types.
        RankError: another rank does something else.
    """
    if collectives.size() == 1:
        return [list(arrays)]
    said = barrier.exchange(None, name, {"shapes": [[str(x.dtype), *x.shape] for x in arrays]})
    shapes = [each["shapes"] for each in said]
    alike = [
        [[shape[0], *shape[2:]] if other_lengths else shape for shape in each] for each in shapes
    ]
    for rank, each in enumerate(alike):
        if each != alike[0]:
            raise ValueError(
                f"{name[:1].upper()}{name[1:]}: rank 0 has {_listed(shapes[0])}, rank {rank} "
                f"{_listed(shapes[rank])}. Make the same on all ranks."
            )
    gathered = _exchanged([x.reshape(-1) for x in arrays], _gathered)
    of_ranks: list[list[np.ndarray]] = [[] for _ in said]
    for place, values in enumerate(gathered):
        first = 0
        for rank, each in enumerate(shapes):
            shape = each[place][1:]
            count = int(np.prod(shape, dtype=np.int64))
            of_ranks[rank].append(values[first : first + count].reshape(shape))
            first += count
    return of_ranks


def _listed(shapes: Sequence[Sequence[Any]]) -> list[str]:
    return [f"{kind} {shape}" for kind, *shape in shapes]


@contextlib.contextmanager
def of_all_ranks(name: str, states: Sequence[Any], combined: Sequence[Combined]) -> Iterator[None]:
    """Inside, variables have the values of all ranks; afterwards each rank's own values again.

    Every rank enters it with the same ones.

    Args:
        name: says what they are, for messages.
        states: variables that were made eagerly.
        combined: what makes one value of the ranks' values, for each of them.

    Raises:
        ValueError: another rank has others.
        RankError: another rank does something else.
    """
    own = [v.numpy() for v in states]
    of_ranks = parts(name, own)
    for variable, combine, values in zip(states, combined, zip(*of_ranks)):
        variable.assign(combine(values))
    try:
        yield
    finally:
        for variable, value in zip(states, own):
            variable.assign(value)


def _gathered(x: tf.Tensor, name: str) -> tf.Tensor:
    if x.dtype == tf.bool:
        return tf.cast(collectives.allgather(tf.cast(x, tf.uint8), name, 0), tf.bool)
    return collectives.allgather(x, name, 0)


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
