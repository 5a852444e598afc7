"""Generated clicks have Criteo's form, and their best AUC is what it says."""

from __future__ import annotations

import numpy as np
import pytest

from common import click_log, metrics
from two_tower import clicked_items

ROWS = 60_000


@pytest.fixture(scope="module")
def log():
    return click_log.generate(ROWS, history=8)


@pytest.fixture(scope="module")
def clicked():
    return clicked_items.generate(20_000)


def test_it_has_criteos_form(log):
    for rows, count in ((log.train, 54_000), (log.test, 6_000)):
        assert rows["dense"].shape == (count, 13) and rows["dense"].dtype == np.float32
        assert rows["categorical"].shape == (count, 26) and rows["categorical"].dtype == np.int64
        assert rows["history"].shape == (count, 8) and rows["history"].dtype == np.int64
        assert set(rows["label"]) == {0, 1} and rows["label"].dtype == np.float32
        assert (rows["dense"] >= 0).all() and (rows["categorical"] >= 0).all()
    largest = log.train["categorical"].max(0)
    assert tuple(largest + 1) == click_log.CARDINALITIES
    assert 0.2 < log.train["label"].mean() < 0.5


def test_a_history_ends_with_nothing(log):
    history = log.train["history"]
    assert history.max() < click_log.CARDINALITIES[click_log.ITEM]
    is_there = history >= 0
    assert (is_there[:, 1:] <= is_there[:, :-1]).all()
    assert set(is_there.sum(1)) == set(range(9))
    assert set(history[~is_there]) == {-1}


def test_a_seed_gives_one_log(log):
    again = click_log.generate(ROWS, history=8)
    for name, values in log.test.items():
        np.testing.assert_array_equal(values, again.test[name])
    other, without = click_log.generate(1000, seed=1), click_log.generate(1000)
    assert (other.train["label"] != without.train["label"]).any()
    assert "history" not in without.train


def test_labels_come_from_the_probability(log):
    for part in np.array_split(np.argsort(log.test_probability), 20):
        expected = log.test_probability[part]
        deviation = np.sqrt((expected * (1 - expected)).sum()) / len(part)
        assert abs(log.test["label"][part].mean() - expected.mean()) < 5 * deviation


def test_the_best_scores_are_what_the_probabilities_alone_say(log):
    """Compares with the expected scores, over all pairs of rows and all their possible labels."""
    p = np.sort(log.test_probability)
    negatives_below = np.concatenate([[0], np.cumsum(1 - p)[:-1]])
    auc = (p * negatives_below).sum() / (p.sum() * (1 - p).sum() - (p * (1 - p)).sum())
    log_loss = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()
    assert log.best_auc == pytest.approx(auc, abs=0.012)
    assert log.best_log_loss == pytest.approx(log_loss, abs=0.015)


def test_any_other_score_is_worse(log):
    noise = np.random.default_rng(0).normal(size=len(log.test_probability))
    for spread in (0.3, 1, 3):
        scores = np.log(log.test_probability) + spread * noise
        assert metrics.auc(log.test["label"], scores) < log.best_auc


def test_items_have_their_own_columns(clicked):
    """An item's columns follow from the item, and the other item is another one."""
    item_columns = clicked.train["categorical"][:, click_log.ITEM :]
    assert len(np.unique(item_columns, axis=0)) == len(np.unique(item_columns[:, 0]))
    assert item_columns[:, 0].max() < clicked_items.ITEMS == clicked_items.TABLE_ROWS[13]
    test = clicked.test
    assert (test["other"] != test["categorical"][:, click_log.ITEM]).all()
    assert "other" not in clicked.train
    assert (test["categorical"] < clicked_items.TABLE_ROWS).all()


def test_the_best_auc_of_clicked_items_is_above_that_of_popularity(clicked):
    """Popularity alone, counted in the training rows, says less than the true utilities."""
    item = click_log.ITEM
    count = np.bincount(clicked.train["categorical"][:, item], minlength=clicked_items.ITEMS)
    advantage = count[clicked.test["categorical"][:, item]] - count[clicked.test["other"]]
    by_popularity = (advantage > 0).mean() + 0.5 * (advantage == 0).mean()
    assert 0.55 < by_popularity < clicked.best_auc - 0.03 < 0.95
