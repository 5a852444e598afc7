"""Builds the input pipeline: examples as a `tf.data.Dataset` of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from census_income.features import Examples


def dataset(examples: Examples, shares: Callable[[], Iterable[np.ndarray]]) -> Any:
    """Makes a batch of each array of row numbers that `shares()` yields."""

    def batches():
        for rows in shares():
            yield examples.take(rows)

    empty_batch = examples.take(np.arange(0))
    signature = tf.nest.map_structure(
        lambda values: tf.TensorSpec([None, *values.shape[1:]], values.dtype), empty_batch
    )
    return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(2)


def next_batch(examples: Examples, shares: Callable[[], Iterable[np.ndarray]]) -> dict:
    """Returns the tensors of the next batch of `dataset`."""
    return tf.data.make_one_shot_iterator(dataset(examples, shares)).get_next()
