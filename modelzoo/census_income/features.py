"""Encodes rows for the model: ids for categorical columns, a vector for the numeric ones.

The encoding is fitted to the training rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from census_income.columns import CATEGORICAL, LABEL, NUMERIC, Rows

OUT_OF_VOCABULARY = 0  # the id of every value that no training row has
LONG_TAILED = ("fnlwgt", "capital_gain", "capital_loss")
BINS = 8


@dataclass(frozen=True)
class Examples:
    """Holds B rows, encoded."""

    ids: dict[str, np.ndarray]  # for each categorical column int64 [B]
    numeric: np.ndarray  # float32 [B, width]
    label: np.ndarray  # float32 [B], 0 or 1

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: np.ndarray) -> dict:
        """Returns the rows of these numbers as the model takes them, a nested dict of arrays."""
        return {
            "ids": {column: ids[rows] for column, ids in self.ids.items()},
            "numeric": self.numeric[rows],
            "label": self.label[rows],
        }


class Encoder:
    """Encodes rows by the vocabularies, quantiles and moments of the training rows.

    A categorical value's id is its place in the training rows' sorted vocabulary, from 1.

    A numeric value is encoded twice: standardised (its logarithm, if the column is long-tailed),
    and as a vector that says how much of each of eight quantile bins it fills (Gorishniy et al., On
    Embeddings for Numerical Features, 2022), so that a small network can bend its answer at every
    quantile. Zeros don't count for the quantiles: most gains are zero.
    """

    def __init__(self, train: Rows):
        self.vocabulary = {column: np.unique(train[column]) for column in CATEGORICAL}
        self.edges, self.mean, self.deviation = {}, {}, {}
        for column in NUMERIC:
            values = train[column]
            quantiles = [0.0]
            if values.any():
                quantiles = np.quantile(values[values != 0], np.linspace(0, 1, BINS + 1))
            self.edges[column] = np.unique(quantiles)
            level = _level(column, values)
            self.mean[column], self.deviation[column] = level.mean(), level.std() or 1.0

    @property
    def width(self) -> int:
        """Returns the length of the numeric vector."""
        return sum(len(edges) for edges in self.edges.values())

    def table_rows(self, column: str) -> int:
        """Counts the rows of this column's table, the one for unknown values included."""
        return len(self.vocabulary[column]) + 1

    def encode(self, rows: Rows) -> Examples:
        numeric = np.concatenate(
            [self._numeric(column, rows[column]) for column in NUMERIC], axis=1
        )
        return Examples(
            ids={column: self._ids(column, rows[column]) for column in CATEGORICAL},
            numeric=numeric.astype(np.float32),
            label=rows[LABEL].astype(np.float32),
        )

    def _ids(self, column: str, values: np.ndarray) -> np.ndarray:
        vocabulary = self.vocabulary[column]
        place = np.minimum(np.searchsorted(vocabulary, values), len(vocabulary) - 1)
        return np.where(vocabulary[place] == values, place + 1, OUT_OF_VOCABULARY).astype(np.int64)

    def _numeric(self, column: str, values: np.ndarray) -> np.ndarray:
        standard = (_level(column, values) - self.mean[column]) / self.deviation[column]
        low, high = self.edges[column][:-1], self.edges[column][1:]
        filled = np.clip((values[:, None] - low) / (high - low), 0, 1)
        return np.concatenate([standard[:, None], filled], axis=1)


def _level(column: str, values: np.ndarray) -> np.ndarray:
    return np.log1p(values) if column in LONG_TAILED else values.astype(np.float64)
