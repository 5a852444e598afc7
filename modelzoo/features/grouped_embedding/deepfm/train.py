"""Trains DeepFM on clicks by an Estimator, with feature columns.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 \\
        modelzoo/features/grouped_embedding/deepfm/train.py

Without the launcher it is one rank. The model is that of Guo et al., DeepFM: A
Factorization-Machine based Neural Network for CTR Prediction (2017): a number of each id, the
products of all pairs of their vectors, and a deep network on the vectors are summed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # features/ and common/ lie there

import tensorflow.compat.v1 as tf

import collective
from common import click_estimator, click_model, layers
from common.click_log import CATEGORICAL
from common.click_model import ClickModel, Features, levels
from common.click_options import Defaults
from common.command_line import TrainingParser
from features.grouped_embedding import deeprec_options

DEEP = (64, 32)


def add_options(parser: TrainingParser) -> None:
    add = parser.add_argument
    add(
        "--ev",
        type=lambda text: text.lower() == "true",
        default=False,
        metavar="True|False",
        help="make the tables dynamic: a row for every id, instead of the remainder of a division",
    )
    add("--ev_filter", choices=("counter", "cbf"), help="with --ev True: admit an id's third time")
    add("--ev_elimination", choices=("gstep", "l2"), help="with --ev True: which rows to evict")
    deeprec_options.add(parser)


def check_options(parser: TrainingParser, parsed: argparse.Namespace) -> None:
    if (parsed.ev_filter or parsed.ev_elimination) and not parsed.ev:
        parser.error("--ev_filter and --ev_elimination are for dynamic tables: add --ev True")


class DeepFm(ClickModel):
    defaults = Defaults(
        "Trains DeepFM on clicks, evaluates it, exports it or predicts with it.",
        learning_rates={"adagrad": 0.05, "adagraddecay": 0.05, "adam": 0.002, "adamasync": 0.002},
        optimizer="adam",
        batch_size=1024,
        add=add_options,
        check=check_options,
    )

    def logits(self, features: Features) -> tf.Tensor:
        counts = levels(features)
        ids = {}
        for column in range(CATEGORICAL):
            ids[f"C{column + 1}"] = (
                features["categorical"][:, column]
                if self.options.own.ev
                else self.row_numbers(features, column)
            )
        rows = [self._row(ids, column, 1 + self.options.dim) for column in range(CATEGORICAL)]
        numbers, vectors = [row[:, :1] for row in rows], [row[:, 1:] for row in rows]
        linear = tf.add_n(numbers) + layers.dense("linear", counts, 1)
        # The square of a sum is the sum of all products, of which each pair's is there twice.
        sum_of_squares = tf.add_n([tf.square(vector) for vector in vectors])
        pairs = 0.5 * (tf.square(tf.add_n(vectors)) - sum_of_squares)
        deep = layers.network("deep", tf.concat([counts, *vectors], axis=1), DEEP)
        machine = tf.reduce_sum(pairs, axis=1, keepdims=True)
        return tf.squeeze(linear + machine + layers.dense("logit", deep, 1), axis=1)

    def _row(self, ids: Features, column: int, dim: int) -> tf.Tensor:
        """Looks a column's ids up by a feature column: [B, dim]."""
        name = f"C{column + 1}"
        if self.options.own.ev:
            categorical = collective.feature_column.categorical_column_with_embedding(
                name, dtype=tf.int64, ev_option=self._ev_option()
            )
        else:
            categorical = tf.feature_column.categorical_column_with_identity(
                name, self.table_rows[column]
            )
        embedding = tf.feature_column.embedding_column(
            categorical, dim, initializer=click_model.first_rows()
        )
        with self.embedding_scope(), tf.variable_scope("columns", reuse=tf.AUTO_REUSE):
            with collective.feature_column.group_embedding_column_scope(name="categorical"):
                return tf.feature_column.input_layer(ids, [embedding])

    def _ev_option(self) -> collective.EmbeddingVariableOption | None:
        own = self.options.own
        if not own.ev_filter and not own.ev_elimination:
            return None
        filters = {
            "counter": lambda: collective.CounterFilter(filter_freq=3),
            "cbf": lambda: collective.CBFFilter(
                filter_freq=3, max_element_size=2**20, false_positive_probability=0.01
            ),
        }
        evictions = {
            "gstep": lambda: collective.GlobalStepEvict(steps_to_live=4000),
            "l2": lambda: collective.L2WeightEvict(l2_weight_threshold=1.0),
        }
        return collective.EmbeddingVariableOption(
            filter_option=filters[own.ev_filter]() if own.ev_filter else None,
            evict_option=evictions[own.ev_elimination]() if own.ev_elimination else None,
        )


if __name__ == "__main__":
    sys.exit(click_estimator.main(DeepFm))
