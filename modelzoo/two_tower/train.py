"""Trains two towers that find items for users by a session, with a sampled softmax.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 modelzoo/two_tower/train.py

Without the launcher it is one rank. One tower makes a vector of a user's columns, the other has one
for each item; their product is the score, of which retrieval takes the largest. Training is a
softmax over the item that was clicked and a sample of all others, corrected for how likely each was
sampled (Bengio and Senecal, Adaptive Importance Sampling to Accelerate Training of a Neural
Probabilistic Language Model, 2008). The sample depends on the seed and the step alone: all ranks
draw the same, and the numbers don't depend on how many they are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow.compat.v1 as tf

from common import click_session, layers
from common.click_log import ITEM
from common.click_model import ClickModel, Features, levels
from common.click_options import ClickOptions, Defaults
from common.click_source import GeneratedSource, Source, load
from common.command_line import TrainingParser, whole_number
from two_tower import clicked_items

USER_TOWER = (64,)


def add_options(parser: TrainingParser) -> None:
    parser.add_argument(
        "--sampled",
        type=whole_number(1),
        default=100,
        help="how many items a step samples, the same for all of its rows",
    )


class TwoTower(ClickModel):
    defaults = Defaults(
        "Trains two towers that find items for users; evaluates, exports or predicts with them.",
        learning_rates={"adagrad": 0.1, "adam": 0.01, "sgd": 0.5},
        optimizer="adam",
        epochs=7,
        rows=100_000,
        add=add_options,
    )

    @classmethod
    def source(cls, options: ClickOptions, fail: Callable[[str], Any]) -> Source:
        return load(
            options.data,
            options.buckets,
            lambda: GeneratedSource(clicked_items.generate(options.rows), clicked_items.TABLE_ROWS),
            fail,
        )

    def logits(self, features: Features) -> tf.Tensor:
        """Builds the scores [B] of users and the items of their rows."""
        return self._score(self._users(features), self.row_numbers(features, ITEM))

    def loss(self, features: Features) -> tf.Tensor:
        """Builds the mean over the batch; rows that aren't clicks count for zero."""
        items, clicked = self.table_rows[ITEM], self.row_numbers(features, ITEM)
        step = tf.train.get_or_create_global_step()
        seed = tf.stack([tf.constant(self.options.seed, tf.int64), tf.cast(step, tf.int64)])
        sampled = tf.random.stateless_uniform([self.options.own.sampled], seed, 0, items, tf.int64)
        users, table = self._users(features), self._items()
        surprise = sampled_softmax(
            users,
            tf.nn.embedding_lookup(table, clicked),
            tf.nn.embedding_lookup(table, sampled),
            clicked,
            sampled,
            items,
        )
        return tf.reduce_mean(features["label"] * surprise)

    def metrics(self, features: Features) -> dict[str, Any]:
        """Compares a clicked item with another, where a row has one."""
        if "other" not in features:
            return super().metrics(features)
        users = self._users(features)
        advantage = self._score(users, self.row_numbers(features, ITEM))
        advantage -= self._score(users, features["other"])
        wins = 0.5 * (tf.sign(advantage) + 1)
        return {
            "auc": tf.metrics.mean(wins),
            "log_loss": tf.metrics.mean(tf.nn.softplus(-advantage)),
        }

    def _users(self, features: Features) -> tf.Tensor:
        """Builds the users' vectors [B, D]."""
        embedded = self.embedded(features, range(ITEM), self.options.dim)
        hidden = layers.network("user", tf.concat([levels(features), *embedded], 1), USER_TOWER)
        return layers.dense("user_vector", hidden, self.options.dim)

    def _items(self) -> tf.Variable:
        """Makes the items' table: a vector each, and a number, how popular it is."""
        return self.table(ITEM, self.options.dim + 1)

    def _score(self, users: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
        return score(users, tf.nn.embedding_lookup(self._items(), items))


def score(users: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Computes the scores [B] of users [B, D] and the rows [B, D + 1] of items."""
    return tf.reduce_sum(users * rows[:, :-1], axis=1) + rows[:, -1]


def sampled_softmax(
    users: tf.Tensor,
    clicked_rows: tf.Tensor,
    sampled_rows: tf.Tensor,
    clicked: tf.Tensor,
    sampled: tf.Tensor,
    items: int,
) -> tf.Tensor:
    """Computes the surprise [B], -log p, at the items that were clicked.

    Args:
        users: their vectors [B, D].
        clicked_rows, sampled_rows: rows of items [B, D + 1], and [S, D + 1].
        clicked, sampled: the numbers of these items.
        items: how many there are in all.
    """
    vectors, own_numbers = sampled_rows[:, :-1], sampled_rows[:, -1]
    others = tf.matmul(users, vectors, transpose_b=True) + own_numbers  # [B, S]
    # What was sampled though it is the row's own item doesn't compete with it.
    others -= 1e9 * tf.cast(tf.equal(sampled, clicked[:, None]), tf.float32)
    # Each of the others stands for so many of them.
    others += math.log(items / int(sampled.shape[0]))
    competing = tf.concat([score(users, clicked_rows)[:, None], others], axis=1)
    return tf.reduce_logsumexp(competing, axis=1) - competing[:, 0]


if __name__ == "__main__":
    sys.exit(click_session.main(TwoTower))
