"""Trains DCN-V2 on clicks by a session, all lookups in one grouped call.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 \\
        modelzoo/features/grouped_embedding/dcnv2/train.py

Without the launcher it is one rank. The model is that of Wang et al., DCN V2: Improved Deep & Cross
Network (2021): each cross layer multiplies the input once more by a linear function of what it has,
of low rank, next to a deep network.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # features/ and common/ lie there

import tensorflow.compat.v1 as tf

import collective
from common import click_model, click_session, layers
from common.click_log import CATEGORICAL
from common.click_model import ClickModel, Features, levels
from common.click_options import Defaults
from common.command_line import TrainingParser
from features.grouped_embedding import deeprec_options

CROSS_LAYERS, RANK = 2, 16
DEEP = (64, 32)


def add_options(parser: TrainingParser) -> None:
    parser.add_argument(
        "--use-feature-columns",
        "--use_feature_columns",
        action="store_true",
        help="look up by feature columns, instead of by group_embedding_lookup",
    )
    deeprec_options.add(parser)


class DcnV2(ClickModel):
    defaults = Defaults(
        "Trains DCN-V2 on clicks, evaluates it, exports it or predicts with it.",
        learning_rates={"adagrad": 0.05, "adam": 0.002, "sgd": 0.1},
        optimizer="adam",
        batch_size=1024,
        add=add_options,
    )

    def logits(self, features: Features) -> tf.Tensor:
        if self.options.own.use_feature_columns:
            embedded = self._by_columns(features)
        else:
            embedded = tf.concat(self._by_group(features), axis=1)
        first = tf.concat([levels(features), embedded], axis=1)
        crossed = first
        for number in range(CROSS_LAYERS):
            lower = layers.dense(f"cross_{number}_lower", crossed, RANK)
            crossed += first * layers.dense(f"cross_{number}", lower, int(first.shape[1]))
        deep = layers.network("deep", first, DEEP)
        return tf.squeeze(layers.dense("logit", tf.concat([crossed, deep], 1), 1), axis=1)

    def _by_group(self, features: Features) -> list[tf.Tensor]:
        tables = [self.table(column, self.options.dim) for column in range(CATEGORICAL)]
        rows = [self.row_numbers(features, column) for column in range(CATEGORICAL)]
        return collective.group_embedding_lookup(tables, rows)

    def _by_columns(self, features: Features) -> tf.Tensor:
        """Looks up by feature columns: [B, 26 D]."""
        ids, columns = {}, []
        with collective.feature_column.group_embedding_column_scope(name="categorical"):
            for column in range(CATEGORICAL):
                name = f"C{column + 1}"
                ids[name] = self.row_numbers(features, column)
                identity = tf.feature_column.categorical_column_with_identity(
                    name, self.table_rows[column]
                )
                columns.append(
                    tf.feature_column.embedding_column(
                        identity, self.options.dim, initializer=click_model.first_rows()
                    )
                )
        with self.embedding_scope(), tf.variable_scope("columns", reuse=tf.AUTO_REUSE):
            return tf.feature_column.input_layer(ids, columns)


if __name__ == "__main__":
    sys.exit(click_session.main(DcnV2))
