"""Generates which items users click, of which the best possible AUC is known.

A row is a user with 13 counts and 13 categorical columns, and one item of a catalogue, which has 13
more. The item is drawn from known probabilities. AUC is here how often a user's item has a higher
score than another item drawn at random: the best possible is that of the true probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.click_log import CARDINALITIES, CATEGORICAL, DENSE, ITEM, TEST_PART, Rows

ITEMS = 400
TASTES = 3
TASTE_COLUMNS = (0, 1, 3)  # of users; the others have nothing to do with tastes
CHUNK = 10_000  # rows whose utilities of all items are in memory together
TABLE_ROWS = (*CARDINALITIES[:ITEM], ITEMS, *CARDINALITIES[ITEM + 1 :])


@dataclass(frozen=True)
class ClickedItems:
    """Holds rows; those of `test` have a feature 'other', the id of another item."""

    train: Rows
    test: Rows
    best_auc: float
    best_log_loss: float


def generate(count: int, seed: int = 0) -> ClickedItems:
    """Generates rows, of which the last tenth are for testing; the same for the same arguments.

    They have the features 'dense' (float32 [R, 13]), 'categorical' (int64 [R, 26]) and 'label',
    which is 1: every row is a click.
    """
    random = np.random.default_rng(seed)
    catalogue = random.integers(TABLE_ROWS[ITEM:], size=(ITEMS, CATEGORICAL - ITEM))
    catalogue[:, 0] = np.arange(ITEMS)
    users = random.integers(TABLE_ROWS[:ITEM], size=(count, ITEM))
    popularity = random.normal(scale=0.8, size=ITEMS)
    characters = random.normal(size=(ITEMS, TASTES))
    tastes = np.zeros((count, TASTES))
    for column in TASTE_COLUMNS:
        tastes += random.normal(scale=0.6, size=(TABLE_ROWS[column], TASTES))[users[:, column]]

    clicked = np.empty(count, np.int64)
    other = (random.integers(1, ITEMS, size=count)).astype(np.int64)
    advantage = np.empty(count)  # in true utility, over the other item
    for start in range(0, count, CHUNK):
        rows = slice(start, start + CHUNK)
        utility = popularity + tastes[rows] @ characters.T
        clicked[rows] = (utility + random.gumbel(size=utility.shape)).argmax(1)
        other[rows] = (clicked[rows] + other[rows]) % ITEMS
        row = np.arange(len(utility))
        advantage[rows] = utility[row, clicked[rows]] - utility[row, other[rows]]

    everything: Rows = {
        "dense": np.floor(random.lognormal(1.5, 1.2, (count, DENSE))).astype(np.float32),
        "categorical": np.concatenate([users, catalogue[clicked]], axis=1).astype(np.int64),
        "label": np.ones(count, np.float32),
    }
    first_test = count - round(TEST_PART * count)
    test = {name: values[first_test:] for name, values in everything.items()}
    test["other"] = other[first_test:]
    known = advantage[first_test:]
    return ClickedItems(
        train={name: values[:first_test] for name, values in everything.items()},
        test=test,
        best_auc=float((known > 0).mean()),
        best_log_loss=float(np.log1p(np.exp(-known)).mean()),
    )
