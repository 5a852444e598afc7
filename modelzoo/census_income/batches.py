"""Chooses the rows that each rank works on at each step.

The global batches are a function of the seed alone. N ranks cut each of them into N contiguous
shares, so training on the mean of the ranks' losses gives the same numbers for every N.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np


def training(
    rows: int, batch: int, steps: int, seed: int, rank: int, ranks: int, finished: int = 0
) -> Iterator[np.ndarray]:
    """Yields this rank's share of each global batch of a training, as row numbers.

    There are `steps` global batches of `batch` rows, which `ranks` divides; the first `finished`
    are left out. Each epoch goes through all rows in an order of its own, except for the last rows
    that fill no batch.
    """
    share = batch // ranks
    per_epoch = rows // batch
    for step in range(finished, steps):
        epoch, place = divmod(step, per_epoch)
        if place == 0 or step == finished:
            order = order_of_epoch(rows, seed, epoch)
        start = place * batch + rank * share
        yield order[start : start + share]


def order_of_epoch(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the row numbers of an epoch, in the order in which training takes them."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


def epochs(rows: int, seed: int) -> Iterator[np.ndarray]:
    """Yields the row numbers of one epoch after another, without end."""
    for epoch in itertools.count():
        yield order_of_epoch(rows, seed, epoch)


def without_gaps(rows: int, batch: int, seed: int, first: int = 0) -> Iterator[np.ndarray]:
    """Yields the global batches that a Trainer makes of `epochs`, from number `first` on.

    An epoch's last rows share a batch with the next epoch's first ones.
    """
    epoch, taken = divmod(first * batch, rows)
    left = order_of_epoch(rows, seed, epoch)[taken:]
    while True:
        while len(left) < batch:
            epoch += 1
            left = np.concatenate([left, order_of_epoch(rows, seed, epoch)])
        yield left[:batch]
        left = left[batch:]


def training_of_all_ranks(
    rows: int, batch: int, steps: int, seed: int, ranks: int, finished: int = 0
) -> Iterator[np.ndarray]:
    """Yields all ranks' shares of each global batch, one after another.

    `strategy.estimator` deals them out: share k goes to rank k mod `ranks`.
    """
    for global_batch in training(rows, batch, steps, seed, 0, 1, finished):
        yield from np.split(global_batch, ranks)


def evaluation(rows: int, batch: int) -> Iterator[np.ndarray]:
    """Yields the numbers of the rows of each batch, which hold every row once, in their order."""
    for start in range(0, rows, batch):
        yield np.arange(start, min(start + batch, rows))
