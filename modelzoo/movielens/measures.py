"""How good probabilities are, exactly, in NumPy."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The probability that a random positive has a higher score than a random negative; a tie
    counts one half.
    """
    positive = np.asarray(labels) > 0
    _, group, size = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(size) - (size - 1) / 2
    positives = int(positive.sum())
    negatives = positive.size - positives
    if not positives or not negatives:
        return float("nan")
    above = mean_rank[group][positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def log_loss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """The mean over the ratings of minus the logarithm of the probability that the label's value
    was given.
    """
    given = np.where(np.asarray(labels) > 0, probabilities, 1 - probabilities)
    return float(-np.log(given).mean())
