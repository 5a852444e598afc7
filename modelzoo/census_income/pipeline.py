"""Examples as a `tf.data.Dataset` of batches, and where training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from features import Examples


def dataset(examples: Examples, shares: Callable[[], Iterable[np.ndarray]]) -> Any:
    """Batches of the rows that `shares()` yields, one array of row numbers after the other."""
    signature = tf.nest.map_structure(
        lambda values: tf.TensorSpec([None, *values.shape[1:]], values.dtype),
        examples.take(np.arange(0)),
    )
    return tf.data.Dataset.from_generator(
        lambda: (examples.take(rows) for rows in shares()), output_signature=signature
    ).prefetch(2)


def next_batch(examples: Examples, shares: Callable[[], Iterable[np.ndarray]]) -> dict:
    """The tensors of the next batch of `dataset`."""
    return tf.data.make_one_shot_iterator(dataset(examples, shares)).get_next()


def steps_done(checkpoint_dir: str | None) -> int:
    """How many steps the latest checkpoint in a folder has been trained; 0 without one.

    Ranks that look before they make their session see the same: only a session saves, and it starts
    on all ranks.
    """
    latest = tf.train.latest_checkpoint(checkpoint_dir) if checkpoint_dir else None
    return int(tf.train.load_variable(latest, tf.GraphKeys.GLOBAL_STEP)) if latest else 0
