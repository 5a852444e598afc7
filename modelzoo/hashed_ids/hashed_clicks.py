"""Generates clicks whose ids are 64-bit hashes that never stop coming.

A row follows from the seed and its number alone. Nothing is kept from row to row, so a log of any
length takes the memory of a batch, and rows are the same for every number of ranks.

Row numbers are time. An id's frequency falls with its rank in its column (Zipf's law, exponent 1):
a few ids come all the time, most once or for a while. Columns differ in two numbers only:

    column    ids            an id is replaced   as
    1 to 12   3 to 900       never               a country, a device, an advertiser
    13 to 20  68 billion     never               a user, a query, an address: half of what comes
                                                 has not come before
    21 to 26  1,000 to 6,000 after 60,000 rows   a campaign, an article

Every id has an effect on the label's logit, and so has every cross of the columns in `CROSSES`.
Effects are drawn alike for all ids, frequent or rare. That rare ids don't help a model is because
they come too seldom to learn from, not because they mean nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from common import metrics
from common.click_log import CATEGORICAL, DENSE, TEST_PART, Rows

LIFETIME = 60_000  # in rows, of an id of the last columns
STABLE = (3, 5, 8, 12, 20, 40, 80, 150, 250, 400, 600, 900)
ENDLESS = (2**36,) * 8
PASSING = (1000, 1500, 2000, 3000, 4000, 6000)
IDS = np.array((*STABLE, *ENDLESS, *PASSING))
IS_PASSING = np.arange(CATEGORICAL) >= len(STABLE) + len(ENDLESS)
# Pairs of columns, counted from 0, whose ids have an effect together.
CROSSES = ((0, 3), (1, 5), (2, 4), (3, 20), (1, 12))
ID_EFFECT, CROSS_EFFECT, DENSE_EFFECT = 0.28, 0.4, 0.5  # standard deviations
BIAS = -0.8
MOST_TEST_ROWS = 50_000
CHUNK = 10_000  # rows that are in memory together


class HashedClicks:
    """Gives the rows of a log that is generated as it is read.

    It is a `common.click_source.Source`. The test rows are those that come after the training
    rows: a tenth, 50,000 at most.

    Args:
        count: of all rows.
        seed: of everything that is drawn.
    """

    shuffled = 1  # the order of rows is that of time
    table_rows = (0,) * CATEGORICAL  # tables are dynamic

    def __init__(self, count: int, seed: int = 0):
        test = min(round(TEST_PART * count), MOST_TEST_ROWS)
        self._first = {"train": 0, "test": count - test}
        self._counts = {"train": count - test, "test": test}
        self._seed = seed

    def count(self, split: str) -> int:
        return self._counts[split]

    def records(self, split: str) -> Any:
        return tf.data.Dataset.range(self.count(split))

    def parse(self, split: str, records: tf.Tensor) -> dict[str, tf.Tensor]:
        def take(numbers: np.ndarray) -> list[np.ndarray]:
            rows, _ = generate(numbers + self._first[split], self._seed)
            return [rows[name] for name in sorted(rows)]

        types = [tf.int64, tf.float32, tf.float32]
        categorical, dense, label = tf.numpy_function(take, [records], types)
        categorical.set_shape([None, CATEGORICAL])
        dense.set_shape([None, DENSE])
        label.set_shape([None])
        return {"categorical": categorical, "dense": dense, "label": label}

    @functools.cached_property
    def best_scores(self) -> tuple[float, float]:
        """Returns AUC and log loss of the test rows' true probabilities."""
        labels, probabilities = [], []
        for start in range(0, self.count("test"), CHUNK):
            numbers = np.arange(start, min(start + CHUNK, self.count("test")))
            rows, probability = generate(numbers + self._first["test"], self._seed)
            labels.append(rows["label"])
            probabilities.append(probability)
        label, probability = np.concatenate(labels), np.concatenate(probabilities)
        return metrics.auc(label, probability), metrics.log_loss(label, probability)

    @property
    def best_auc(self) -> float | None:
        return self.best_scores[0]

    @property
    def reference(self) -> str:
        auc, log_loss = self.best_scores
        return (
            f"the best possible, for who knows every id's effect, is AUC {auc:.4f}  "
            f"log loss {log_loss:.4f}"
        )


def generate(numbers: np.ndarray, seed: int = 0) -> tuple[Rows, np.ndarray]:
    """Generates the rows of some numbers.

    Args:
        numbers: int64 [R], from 0.
        seed: of everything that is drawn.

    Returns:
        'dense' (float32 [R, 13], counts), 'categorical' (int64 [R, 26]) and 'label' (float32 [R]);
        and the probability of each label being 1, float64 [R].
    """
    row = _mixed(seed, "row", numbers[:, None])
    column = np.arange(CATEGORICAL)
    share = _uniform(_mixed(row, "id", column))
    # Zipf's law: the ranks up to r have the part log(1 + r) / log(1 + IDS).
    rank = np.floor(np.exp(share * np.log1p(IDS))).astype(np.int64) - 1
    place = _mixed(seed, "place", column, rank)
    # Not all ids of a column are replaced at once.
    age = numbers[:, None] + (place % np.uint64(LIFETIME)).astype(np.int64)
    ids = _mixed(place, "id", np.where(IS_PASSING, age // LIFETIME, 0))

    normal = _normal(_mixed(row, "dense", np.arange(DENSE)))
    dense = np.floor(np.exp(1.5 + 1.2 * normal)).astype(np.float32)
    logit = BIAS + DENSE_EFFECT * np.tanh(np.log1p(dense[:, 0]) - 1.6)
    logit += ID_EFFECT * _normal(_mixed(ids, "effect")).sum(1)
    for first, second in CROSSES:
        logit += CROSS_EFFECT * _normal(_mixed(ids[:, first], "cross", ids[:, second]))
    probability = 1 / (1 + np.exp(-logit))
    label = _uniform(_mixed(row, "label"))[:, 0] < probability
    rows = {"dense": dense, "categorical": ids.view(np.int64), "label": label.astype(np.float32)}
    return rows, probability


def _mixed(*parts: Any) -> np.ndarray:
    """Mixes numbers and words into uint64, element by element: SplitMix64's output function."""
    result = np.zeros(1, np.uint64)
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(part.encode(), "little")
        with np.errstate(over="ignore"):
            x = result + np.asarray(part).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            result = x ^ (x >> np.uint64(31))
    return result


def _uniform(bits: np.ndarray) -> np.ndarray:
    """Returns numbers in [0, 1)."""
    return (bits >> np.uint64(11)) * 2.0**-53


def _normal(bits: np.ndarray) -> np.ndarray:
    """Returns numbers of the standard normal distribution, by Box and Muller's rule."""
    radius = np.sqrt(-2 * np.log1p(-_uniform(bits)))
    return radius * np.cos(2 * np.pi * _uniform(_mixed(bits, "angle")))
