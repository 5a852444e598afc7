"""Trains two towers that find items for users by Keras's `fit`: the model of train.py.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 modelzoo/two_tower/fit.py

The loss is a softmax over an item and a sample of all others, so the model has a `train_step` of
its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow.compat.v2 as tf

from common import click_fit
from common.click_log import CATEGORICAL, DENSE, ITEM
from common.click_model import levels
from common.click_options import ClickOptions
from two_tower.train import USER_TOWER, TwoTower, sampled_softmax, score


class TwoTowerModel(tf.keras.Model):
    """Scores users and items; it is built within embedding_scope().

    Args:
        options: of the program.
        table_rows: of the categorical columns.
    """

    def __init__(self, options: ClickOptions, table_rows: tuple[int, ...]):
        super().__init__()
        self.options, self.table_rows = options, table_rows
        features = {
            "dense": tf.keras.Input([DENSE], name="dense"),
            "categorical": tf.keras.Input([CATEGORICAL], dtype=tf.int64, name="categorical"),
        }
        rows = click_fit.embedded(features["categorical"], range(ITEM), table_rows, options.dim)
        hidden = click_fit.network(tf.concat([levels(features), *rows], 1), USER_TOWER, "user")
        vector = tf.keras.layers.Dense(options.dim, name="user_vector")(hidden)
        self.users = tf.keras.Model(features, vector)
        # A vector for each item, and a number, how popular it is.
        self.items = tf.keras.layers.Embedding(
            table_rows[ITEM], options.dim + 1, click_fit.first_rows(), name="items"
        )
        self.items.build([None])
        self.wins = tf.keras.metrics.Mean(name="auc")
        self.surprise = tf.keras.metrics.Mean(name="log_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.wins, self.surprise]

    def train_step(self, data: Any) -> dict[str, Any]:
        features, label = data
        items = self.table_rows[ITEM]
        clicked = click_fit.row_numbers(features["categorical"], ITEM, self.table_rows)
        seed = tf.stack([tf.constant(self.options.seed, tf.int64), self.optimizer.iterations])
        count = self.options.own.sampled
        sampled = tf.random.stateless_uniform([count], seed, 0, items, tf.int64)
        with tf.GradientTape() as tape:
            users = self._users(features)
            surprise = sampled_softmax(
                users, self.items(clicked), self.items(sampled), clicked, sampled, items
            )
            loss = tf.reduce_mean(label * surprise)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.surprise.update_state(surprise)
        return {"log_loss": self.surprise.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        """Compares a clicked item with another."""
        features, _ = data
        users = self._users(features)
        clicked = click_fit.row_numbers(features["categorical"], ITEM, self.table_rows)
        advantage = score(users, self.items(clicked)) - score(users, self.items(features["other"]))
        self.wins.update_state(0.5 * (tf.sign(advantage) + 1))
        self.surprise.update_state(tf.nn.softplus(-advantage))
        return {metric.name: metric.result() for metric in self.metrics}

    def _users(self, features: dict[str, Any]) -> Any:
        return self.users({name: features[name] for name in ("dense", "categorical")})


if __name__ == "__main__":
    sys.exit(click_fit.main(TwoTower, TwoTowerModel, {}))
