"""Builds the input pipelines, the same on every rank: `strategy.estimator` deals their batches.

Of N ranks each gets every N-th batch. With training batches of 1/N of the global batch, the N
batches of a step together hold the same ratings for every N, and in the same order: the mean of
their mean losses is the global batch's.
"""

from __future__ import annotations

from typing import Any

from movielens.ratings import Ratings

# Of one rank. Whole batches are dealt, so they are the same for every number of ranks.
EVALUATION_BATCH = 1024


def training(ratings: Ratings, batch: int, ranks: int, seed: int, step: int = 0) -> Any:
    """Makes endless batches of `batch` / `ranks` ratings, from global step `step` on.

    Each epoch has an order of its own.
    """
    shuffled = ratings.dataset().shuffle(len(ratings), seed=seed, reshuffle_each_iteration=True)
    remaining = shuffled.repeat().skip(step * batch)
    return remaining.batch(batch // ranks, drop_remainder=True).prefetch(2)


def evaluation(ratings: Ratings) -> Any:
    return ratings.dataset().batch(EVALUATION_BATCH)
