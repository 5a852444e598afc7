"""Brings data whose order differs from epoch to epoch into the order of a later epoch.

`Dataset.shuffle` has another order for each iterator over it. A dataset makes the iterators of what
it consists of at once, or when it comes to them:

    one shuffle                              an iterator is made, and no record read
    several, or a shuffle that is repeated   an epoch is read to its end
    a shuffle before a cache                 nothing: all epochs have the first one's order
    a Keras Sequence                         its on_epoch_end is called
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.tensorflow_internals.keras import package

# What tells of a dataset that each iterator has another order, or other numbers.
_EACH_ITERATION = ("_reshuffle_each_iteration", "_rerandomize")
_SEVERAL_TIMES = ("Repeat", "Concatenate")


def pass_over(data: Any, steps: int | None, iterators: int = 1) -> None:
    """Passes over one epoch of the data that Keras takes from their beginning in each epoch.

    Args:
        data: a dataset, a Sequence, or anything else, which has the same order in each epoch.
        steps: how many batches an epoch has; None: all.
        iterators: how many iterators Keras makes for an epoch, of which it uses the last.
    """
    if isinstance(data, package.utils.Sequence):
        data.on_epoch_end()
    if not isinstance(data, (tf.data.Dataset, tf2.data.Dataset)):
        return
    parts = list(_parts(data))
    shuffles = sum(any(getattr(part, name, False) for name in _EACH_ITERATION) for part in parts)
    if not shuffles:
        return
    for _ in range(iterators):
        batches = iter(data)
    names = " ".join(type(part).__name__ for part in parts)
    if shuffles > 1 or any(name in names for name in _SEVERAL_TIMES):
        for _ in itertools.islice(batches, steps):
            pass


def _parts(data: Any) -> Iterator[Any]:
    """Yields a dataset and those that it is made of, but not those before a cache."""
    if "Cache" not in type(data).__name__:
        yield data
        for part in data._inputs():
            yield from _parts(part)
