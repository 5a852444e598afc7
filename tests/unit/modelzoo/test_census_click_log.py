"""The generated click log has the census' columns, and its best AUC is what it says."""

from __future__ import annotations

import numpy as np
import pytest

from census_income import click_log
from census_income.columns import CATEGORICAL, LABEL, NUMERIC
from common import metrics


@pytest.fixture(scope="module")
def log():
    return click_log.generate()


def test_it_has_the_rows_columns_and_types_of_the_census(log):
    for rows, count in ((log.train, 32561), (log.test, 16281)):
        assert set(rows) == {*CATEGORICAL, *NUMERIC, LABEL}
        assert {values.shape for values in rows.values()} == {(count,)}
        assert all(rows[column].dtype.kind == "U" for column in CATEGORICAL)
        assert all(rows[column].dtype == np.int64 for column in (*NUMERIC, LABEL))
        assert 0.1 < rows[LABEL].mean() < 0.4
    assert {column for column in CATEGORICAL if "?" in log.train[column]} == {
        "workclass",
        "occupation",
        "native_country",
    }


def test_a_seed_gives_one_log(log):
    again, other = click_log.generate(), click_log.generate(seed=1)
    for column, values in log.train.items():
        np.testing.assert_array_equal(values, again.train[column])
    assert (other.train[LABEL] != log.train[LABEL]).any()


def test_labels_come_from_the_probability(log):
    order = np.argsort(log.test_probability)
    for part in np.array_split(order, 20):
        expected = log.test_probability[part]
        deviation = np.sqrt((expected * (1 - expected)).sum()) / len(part)
        assert abs(log.test[LABEL][part].mean() - expected.mean()) < 5 * deviation


def test_best_auc_is_what_the_probabilities_alone_say(log):
    """Compares with the expected AUC, over all pairs of rows and all their possible labels."""
    p = np.sort(log.test_probability)
    negatives_below = np.concatenate([[0], np.cumsum(1 - p)[:-1]])
    expected = (p * negatives_below).sum() / (p.sum() * (1 - p).sum() - (p * (1 - p)).sum())
    assert log.best_auc == pytest.approx(expected, abs=0.006)


def test_any_other_score_is_worse(log):
    noise = np.random.default_rng(0).normal(size=len(log.test_probability))
    for spread in (0.3, 1, 3):
        scores = np.log(log.test_probability) + spread * noise
        assert metrics.auc(log.test[LABEL], scores) < log.best_auc
