"""A generated log with the census data's columns, for where that data can't be had.

Every label is drawn from a probability that is a known function of its row, so the best AUC that
any model can be expected to reach on the test rows is known: that probability's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from census_income.columns import LABEL, MISSING, Rows
from common import metrics

TRAIN_ROWS, TEST_ROWS = 32561, 16281  # as many as in the census
CARDINALITY = {
    "workclass": 9,
    "education": 16,
    "marital_status": 7,
    "occupation": 15,
    "relationship": 6,
    "race": 5,
    "sex": 2,
    "native_country": 42,
}
HAVE_MISSING = ("workclass", "occupation", "native_country")


@dataclass(frozen=True)
class ClickLog:
    train: Rows
    test: Rows
    test_probability: np.ndarray  # of each test row's label being 1

    @property
    def best_auc(self) -> float:
        return metrics.auc(self.test[LABEL], self.test_probability)


def generate(seed: int = 0, train_rows: int = TRAIN_ROWS, test_rows: int = TEST_ROWS) -> ClickLog:
    """Generates a log; the same arguments give the same log."""
    random = np.random.default_rng(seed)
    count = train_rows + test_rows
    rows, logit = _categorical(random, count)
    numeric = _numeric(random, count)
    rows.update(numeric)
    logit += _numeric_effect(numeric)
    # One interaction of two columns.
    logit += np.where(rows["sex"] == "sex-0", 0.5, -0.5) * (numeric["age"] - 38) / 14
    probability = 1 / (1 + np.exp(-(1.2 * logit - 1.4)))
    rows[LABEL] = (random.random(count) < probability).astype(np.int64)
    return ClickLog(
        train={column: values[:train_rows] for column, values in rows.items()},
        test={column: values[train_rows:] for column, values in rows.items()},
        test_probability=probability[train_rows:],
    )


def _categorical(random: np.random.Generator, count: int) -> tuple[Rows, np.ndarray]:
    """Draws values of skewed frequency, and sums the effects that they have on the logit."""
    rows: Rows = {}
    logit = np.zeros(count)
    for column, cardinality in CARDINALITY.items():
        names = np.array([f"{column}-{value}" for value in range(cardinality)])
        if column in HAVE_MISSING:
            names[2] = MISSING
        weight = 1 / np.arange(1, cardinality + 1)
        value = random.choice(cardinality, size=count, p=weight / weight.sum())
        effect = random.normal(scale=0.6, size=cardinality)
        rows[column] = names[value]
        logit += effect[value]
    return rows, logit


def _numeric(random: np.random.Generator, count: int) -> Rows:
    seldom = random.random((2, count)) < [[0.08], [0.05]]
    columns = {
        "age": np.clip(random.normal(38, 14, count), 17, 90),
        "fnlwgt": np.clip(random.lognormal(12, 0.6, count), 12000, 1500000),
        "education_num": random.integers(1, 17, count),
        "capital_gain": np.where(
            seldom[0], np.clip(random.lognormal(8.5, 1.0, count), 100, 99999), 0
        ),
        "capital_loss": np.where(seldom[1], np.clip(random.normal(1870, 300, count), 150, 4400), 0),
        "hours_per_week": np.clip(random.normal(40, 12, count), 1, 99),
    }
    return {column: values.astype(np.int64) for column, values in columns.items()}


def _numeric_effect(columns: Rows) -> np.ndarray:
    """Computes an effect on the logit that is neither linear nor monotonic everywhere.

    fnlwgt has none.
    """
    return (
        1.0
        - ((columns["age"] - 48) / 18) ** 2 * 0.7
        + 0.25 * (columns["education_num"] - 8.5) / 2
        + 0.9 * np.log1p(columns["capital_gain"] / 2000)
        + 0.6 * (columns["capital_loss"] > 1850)
        + 0.7 * np.tanh((columns["hours_per_week"] - 40) / 10)
    )
