"""Computes exact metrics of binary predictions, in NumPy."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Computes the area under the ROC curve of B scores.

    It is the probability that a random positive has a higher score than a random negative, where a
    tie counts one half. It is computed from the ranks of the scores; tied scores share their mean
    rank. The result is NaN unless there are both kinds of labels.
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
    """Computes the part of the logits that have the label's side of zero."""
    return float(np.mean((np.asarray(logits) > 0) == (np.asarray(labels) > 0)))


def log_loss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Computes the mean of -log p, where p is the probability that was given to the true label."""
    of_true_label = np.where(np.asarray(labels) > 0, probabilities, 1 - probabilities)
    return float(-np.log(of_true_label).mean())
