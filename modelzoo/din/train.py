"""Trains DIN on clicks by a session: attention to the items that a user clicked before.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 modelzoo/din/train.py

Without the launcher it is one rank. The model is that of Zhou et al., Deep Interest Network for
Click-Through Rate Prediction (2018): a small network weighs each item of a history by what it has
to do with the item that is shown, and their weighted mean is one more input. Weights don't sum to
one: how much of a history has to do with the item isn't lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow.compat.v1 as tf

from common import click_log, click_session, layers
from common.click_log import CATEGORICAL, ITEM
from common.click_model import ClickModel, Features, levels
from common.click_options import ClickOptions, Defaults
from common.click_source import GeneratedSource, Source, load
from common.command_line import TrainingParser, whole_number

ATTENTION, DEEP = (32, 16), (64, 32)


def add_options(parser: TrainingParser) -> None:
    parser.add_argument(
        "--history",
        type=whole_number(1),
        default=8,
        help="the longest history; a line of --data has it as a field after the others: items, "
        "separated by spaces",
    )


class Din(ClickModel):
    defaults = Defaults(
        "Trains DIN on clicks, evaluates it, exports it or predicts with it.",
        learning_rates={"adagrad": 0.05, "adam": 0.003, "sgd": 0.1},
        optimizer="adam",
        batch_size=1024,
        epochs=3,
        rows=400_000,
        add=add_options,
    )

    @classmethod
    def source(cls, options: ClickOptions, fail: Callable[[str], Any]) -> Source:
        longest = options.own.history
        return load(
            options.data,
            options.buckets,
            lambda: GeneratedSource(click_log.generate(options.rows, history=longest)),
            fail,
            longest,
        )

    def placeholders(self) -> Features:
        """Makes the inputs of the served model; a history ends with -1 where it is short."""
        history = tf.placeholder(tf.int64, [None, self.options.own.history], name="history")
        return {**super().placeholders(), "history": history}

    def logits(self, features: Features) -> tf.Tensor:
        dim = self.options.dim
        embedded = self.embedded(features, range(CATEGORICAL), dim)
        interest = self._interest(features["history"], embedded[ITEM])
        values = tf.concat([levels(features), *embedded, interest], axis=1)
        hidden = layers.network("deep", values, DEEP)
        return tf.squeeze(layers.dense("logit", hidden, 1), axis=1)

    def _interest(self, history: tf.Tensor, item: tf.Tensor) -> tf.Tensor:
        """Averages a history's rows, weighed by their attention to the item: [B, D + 1].

        The last column is the mean weight.
        """
        is_there = tf.cast(history >= 0, tf.float32)[..., None]
        rows = tf.math.floormod(tf.maximum(history, 0), self.table_rows[ITEM])
        past = tf.nn.embedding_lookup(self.table(ITEM, self.options.dim), rows)  # [B, T, D]
        shown = item[:, None] + tf.zeros_like(past)
        pairs = tf.concat([past, shown, past - shown, past * shown], axis=-1)
        hidden = layers.network("attention", pairs, ATTENTION)
        weight = layers.dense("attention_weight", hidden, 1) * is_there
        weighed = tf.concat([weight * past, weight], axis=-1)
        return tf.reduce_sum(weighed, axis=1) / tf.maximum(tf.reduce_sum(is_there, axis=1), 1)


if __name__ == "__main__":
    sys.exit(click_session.main(Din))
