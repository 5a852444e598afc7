"""The input of training and of evaluation, the same on every rank; strategy.estimator deals its
batches to the ranks.

Of N ranks each gets every N-th batch. With training batches of 1/N of the global batch, the N
batches of a step together hold the same ratings for every N, and in the same order: the mean of
their mean losses is the global batch's.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf
from ratings import Ratings

# of one rank; whole batches are dealt, so they are the same for every number of ranks
EVALUATION_BATCH = 1024


def training(ratings: Ratings, batch: int, ranks: int, seed: int, step: int = 0) -> Any:
    """Endless batches of `batch` / `ranks` ratings, each epoch in an order of its own, from global
    step `step` on.
    """
    every = (
        ratings.dataset().shuffle(len(ratings), seed=seed, reshuffle_each_iteration=True).repeat()
    )
    return every.skip(step * batch).batch(batch // ranks, drop_remainder=True).prefetch(2)


def evaluation(ratings: Ratings) -> Any:
    return ratings.dataset().batch(EVALUATION_BATCH)


def step_reached(checkpoint: str | None) -> int:
    """How many global steps a checkpoint's model has been trained; 0 without one."""
    return int(tf.train.load_variable(checkpoint, tf.GraphKeys.GLOBAL_STEP)) if checkpoint else 0
