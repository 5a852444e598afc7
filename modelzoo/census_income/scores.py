"""How good predictions are: area under the ROC curve and accuracy, exactly, in NumPy."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The probability that a random positive has a higher score than a random negative; a tie
    counts one half.

    Computed from the ranks of the scores, tied scores sharing their mean rank. NaN unless there are
    both kinds of labels.
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


def accuracy(labels: np.ndarray, logits: np.ndarray) -> float:
    """The part of the rows whose logit has the label's side of zero."""
    return float(np.mean((np.asarray(logits) > 0) == (np.asarray(labels) > 0)))
