"""Compares metrics with their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common import metrics


def auc_by_definition(labels, values) -> float:
    above = np.sign(values[labels > 0][:, None] - values[labels == 0][None, :]).astype(np.float64)
    return float((above + 1).mean() / 2)


@pytest.mark.parametrize("seed", range(20))
def test_auc_is_the_chance_that_a_positive_is_above_a_negative(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 200))
    labels = random.integers(0, 2, count).astype(np.float32)
    labels[:2] = 0, 1
    values = random.integers(0, random.integers(1, 50), count).astype(np.float32)  # many ties
    assert metrics.auc(labels, values) == pytest.approx(
        auc_by_definition(labels, values), abs=1e-12
    )


def test_auc_at_its_limits():
    assert metrics.auc(np.array([0, 1]), np.array([1.0, 2.0])) == 1
    assert metrics.auc(np.array([1, 0]), np.array([1.0, 2.0])) == 0
    assert metrics.auc(np.array([1, 0]), np.array([3.0, 3.0])) == 0.5
    assert math.isnan(metrics.auc(np.array([1, 1]), np.array([1.0, 2.0])))


def test_accuracy():
    assert metrics.accuracy(np.array([0, 0, 1, 1]), np.array([-1.0, 2.0, 3.0, 4.0])) == 0.75


def test_log_loss():
    labels, probabilities = np.array([0, 1, 1]), np.array([0.25, 0.5, 0.125])
    expected = -(math.log(0.75) + math.log(0.5) + math.log(0.125)) / 3
    assert metrics.log_loss(labels, probabilities) == pytest.approx(expected)
