"""Tests the encoding of rows: ids of values, and vectors of numbers."""

from __future__ import annotations

import numpy as np

from census_income import click_log, features
from census_income.columns import CATEGORICAL, NUMERIC


def test_values_get_ids_and_unseen_ones_the_out_of_vocabulary_row():
    log = click_log.generate(train_rows=200, test_rows=5)
    test = {**log.test, "race": np.array(["race-0", "unseen", "?", "race-1", "zzz"])}
    encoder = features.Encoder(log.train)
    ids = encoder.encode(test).ids["race"]
    seen = sorted(set(log.train["race"]))
    assert list(ids) == [1 + seen.index("race-0"), 0, 0, 1 + seen.index("race-1"), 0]
    train = encoder.encode(log.train)
    for column in CATEGORICAL:
        assert train.ids[column].dtype == np.int64
        # Missing values, '?', have an id like any other.
        assert set(train.ids[column]) == set(range(1, encoder.table_rows(column)))


def test_numbers_are_finite_and_bounded_even_where_a_column_is_constant():
    log = click_log.generate(train_rows=100, test_rows=50)
    train = {**log.train, "age": np.full(100, 40), "capital_gain": np.zeros(100, np.int64)}
    encoder = features.Encoder(train)
    numeric = encoder.encode(log.test).numeric
    assert numeric.dtype == np.float32 and numeric.shape[0] == 50
    assert np.isfinite(numeric).all()
    assert numeric.shape[1] == encoder.encode(train).numeric.shape[1]
    assert numeric.shape[1] <= len(NUMERIC) * (1 + features.BINS)


def test_bins_fill_one_after_the_other():
    train = click_log.generate(train_rows=1000, test_rows=1).train
    numeric = features.Encoder(train).encode(train).numeric
    filled = numeric[:, 1 : 1 + features.BINS]  # of the first column
    assert filled.min() == 0 and filled.max() == 1
    assert (np.diff(filled, axis=1) <= 0).all()
    assert (np.diff(filled.sum(axis=1)[np.argsort(train["age"], kind="stable")]) >= 0).all()
