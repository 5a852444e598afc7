"""Generates a click log of Criteo's form, of which the best possible AUC is known.

A row has 13 counts, the ids of 26 categorical columns, and a label, which is drawn from a known
function of the row. So the best AUC and log loss that any model can be expected to reach on the
test rows are known: those of the true probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common import metrics

DENSE, CATEGORICAL = 13, 26
# How many ids each categorical column has; ids are seldom in the order of their numbers.
CARDINALITIES = (*(20, 10, 8, 25, 5, 12, 4, 6, 15, 3, 8, 5, 3),) * 2
USER, ITEM = 0, 13  # the columns whose ids have tastes, and characters
TASTES = 2
GROUPS = 5  # of items: a history tells which of them a user likes
TEST_PART = 0.1

# Names of features and their values for a number of rows, and 'label', float32 [R].
Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class ClickLog:
    train: Rows
    test: Rows
    test_probability: np.ndarray  # of each test row's label being 1

    @property
    def best_auc(self) -> float:
        return metrics.auc(self.test["label"], self.test_probability)

    @property
    def best_log_loss(self) -> float:
        return metrics.log_loss(self.test["label"], self.test_probability)


def generate(count: int, seed: int = 0, history: int = 0) -> ClickLog:
    """Generates a log; the same arguments give the same log.

    Args:
        count: of rows; the last tenth are the test rows.
        seed: of everything that is drawn.
        history: the longest history of items, or 0 for rows without one.

    Returns:
        Rows of the features 'dense' (float32 [R, 13], counts), 'categorical' (int64 [R, 26]) and,
        with a history, 'history' (int64 [R, history]: ids of column 14, -1 after the last).
    """
    random = np.random.default_rng(seed)
    effects = [random.normal(scale=0.5, size=size) for size in CARDINALITIES]
    tastes = random.normal(size=(CARDINALITIES[USER], TASTES))
    characters = random.normal(size=(CARDINALITIES[ITEM], TASTES))
    ids = np.stack([_draw(random, size, count) for size in CARDINALITIES], axis=1)
    dense = np.floor(random.lognormal(1.5, 1.2, (count, DENSE))).astype(np.float32)

    logit = np.zeros(count)
    for column, effect in enumerate(effects):
        logit += effect[ids[:, column]]
    logit += 0.15 * (tastes[ids[:, USER]] * characters[ids[:, ITEM]]).sum(1)
    logit += _dense_effect(dense)
    rows: Rows = {"dense": dense, "categorical": ids}
    if history:
        rows["history"] = _histories(random, count, history)
        logit += 3 * _liking(rows["history"], ids[:, ITEM])
    probability = 1 / (1 + np.exp(-(logit - logit.mean() - 0.8)))
    rows["label"] = (random.random(count) < probability).astype(np.float32)
    first_test = count - round(TEST_PART * count)
    return ClickLog(
        train={name: values[:first_test] for name, values in rows.items()},
        test={name: values[first_test:] for name, values in rows.items()},
        test_probability=probability[first_test:],
    )


def _draw(random: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Draws ids of which a few are frequent and most are rare."""
    weight = 1 / (np.arange(size) + 2)
    return random.permutation(size)[random.choice(size, size=count, p=weight / weight.sum())]


def _dense_effect(dense: np.ndarray) -> np.ndarray:
    """Computes an effect on the logit that isn't linear; most counts have none."""
    level = np.log1p(dense)
    return 0.8 * np.tanh(level[:, 0] - 1.6) + 0.5 * np.abs(level[:, 1] - 1.6)


def _histories(random: np.random.Generator, count: int, longest: int) -> np.ndarray:
    """Draws items clicked before: up to `longest`, of one group more than of others."""
    items = _draw(random, CARDINALITIES[ITEM], count * longest).reshape(count, longest)
    liked = random.integers(GROUPS, size=(count, 1))
    of_liked_group = items - items % GROUPS + liked
    fits = (of_liked_group < CARDINALITIES[ITEM]) & (random.random(items.shape) < 0.4)
    length = random.integers(longest + 1, size=(count, 1))
    return np.where(np.arange(longest) < length, np.where(fits, of_liked_group, items), -1)


def _liking(history: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Computes the part of a history that is of the item's group; 0 without a history."""
    there = history >= 0
    same = there & (history % GROUPS == (item % GROUPS)[:, None])
    return same.sum(1) / np.maximum(there.sum(1), 1)
