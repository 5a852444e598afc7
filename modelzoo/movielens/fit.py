"""Trains two towers on movie ratings, a model of TensorFlow Recommenders, by Keras's `fit`.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 \\
        modelzoo/movielens/fit.py --export-dir /tmp/ratings

Without the launcher it is one rank. The lines marked with (*) are those that a script for one
process doesn't have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow as tf

from collective import CollectiveStrategy  # (*) before tf.keras is used, which is Keras 2 then
from collective.keras.callbacks import Checkpoint
from collective.keras.layers import Embedding  # (*) ids of any number, without a vocabulary
from common import optimizers, reporting
from movielens import options, ratings
from movielens.evaluation_report import score_line
from movielens.input_pipeline import EVALUATION_BATCH
from movielens.model import INITIAL
from movielens.ratings import HIGH

try:
    import tensorflow_recommenders as tfrs
except ImportError as error:
    raise SystemExit(
        f"fit.py: error: TensorFlow Recommenders can't be imported here ({error}): `make setup` "
        "installs it, or pip install '.[recommenders]' in the checkout. train.py does without"
    ) from error


class TwoTowers(tfrs.Model):
    """Says by two vectors how likely a user gives a movie at least four stars.

        logit = own(user) + own(movie) + sum(vector(user) * vector(movie))

    Each tower makes the number of its own and the vector from the row of an id.

    Args:
        dim: of rows and vectors.
        l2: how much the squares of the towers' values add to a rating's loss.
    """

    def __init__(self, dim: int, l2: float):
        super().__init__()
        self._l2 = l2
        self.user, self.movie = tower("user", dim), tower("movie", dim)
        self.task = tfrs.tasks.Ranking(
            loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[
                tf.keras.metrics.AUC(2000, from_logits=True, name="auc"),
                tf.keras.metrics.BinaryCrossentropy(from_logits=True, name="log_loss"),
            ],
        )

    def compute_loss(self, features: dict[str, Any], training: bool = False) -> Any:
        vectors = self.user(features["user_id"]), self.movie(features["movie_id"])
        high = tf.cast(features["user_rating"][:, None] >= HIGH, tf.float32)
        loss = self.task(labels=high, predictions=logits(*vectors))
        squares = [tf.reduce_sum(tf.square(each), axis=1) for each in vectors]
        return loss + self._l2 * tf.reduce_mean(tf.add_n(squares))

    def served(self) -> tf.keras.Model:
        """Returns the model from ids [B] of users and of movies to probabilities [B]."""
        ids = {
            key: tf.keras.Input([], dtype=tf.string, name=key) for key in ("user_id", "movie_id")
        }
        scores = logits(self.user(ids["user_id"]), self.movie(ids["movie_id"]))[:, 0]
        return tf.keras.Model(
            ids, tf.keras.layers.Activation("sigmoid", name="probability")(scores)
        )


def tower(name: str, dim: int) -> tf.keras.Model:
    """Makes a model from ids [B] to a number and a vector each, [B, 1 + dim]."""
    first_rows = tf.keras.initializers.RandomUniform(-INITIAL, INITIAL)
    rows = Embedding(1 + dim, embeddings_initializer=first_rows, name=f"{name}_id")
    return tf.keras.Sequential([rows, tf.keras.layers.Dense(1 + dim, name=f"{name}_vector")])


def logits(user: Any, movie: Any) -> Any:
    products = tf.reduce_sum(user[:, 1:] * movie[:, 1:], axis=1, keepdims=True)
    return user[:, :1] + movie[:, :1] + products


def main() -> None:
    chosen = options.parse(rank=int(os.environ.get("HOROVOD_RANK", 0)))
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    report = reporting.reporter(rank)
    command_line = options.parser(rank)
    command_line.check_batch_size(chosen.batch_size, ranks)

    split = ratings.load(chosen, report, command_line.error)
    train, test = split.train, split.test
    command_line.check_full_batch(chosen.batch_size, len(train))
    tables = f"2 dynamic tables of dimension {1 + chosen.dim}"
    report(reporting.summary(chosen, len(train), "ratings", ranks, tables))

    # Each epoch has an order of its own, the same on all ranks.
    shuffled = train.dataset().shuffle(len(train), seed=chosen.seed)
    # (*) this rank's share of each batch, and of the test ratings
    batches = strategy.shard(shuffled).batch(chosen.batch_size // ranks, drop_remainder=True)
    tested = strategy.shard(test.dataset()).batch(EVALUATION_BATCH)
    if chosen.steps:
        batches = batches.repeat().take(chosen.steps)

    with strategy.scope():  # (*)
        tf.keras.utils.set_random_seed(chosen.seed)
        with strategy.embedding_scope():  # (*) the tables are sharded, everything else replicated
            model = TwoTowers(chosen.dim, chosen.l2)
        model.compile(optimizers.create_keras(chosen.optimizer, chosen.learning_rate))
        # A --model-dir that was used before: training goes on where it ended.
        callbacks = (
            [Checkpoint(chosen.model_dir, continue_id="ratings")] if chosen.model_dir else []
        )
        model.fit(
            batches.prefetch(2),
            epochs=1 if chosen.steps else chosen.epochs,
            callbacks=callbacks,
            verbose=2,  # on rank 0
        )
        scores = model.evaluate(tested, verbose=0, return_dict=True)
        scores["global_step"] = int(model.optimizer.iterations.numpy())
        report(score_line(scores, len(test)))
        if split.reference:
            report(split.reference)
        if chosen.export_dir:
            strategy.export_saved_model(chosen.export_dir, model=model.served())  # (*)


if __name__ == "__main__":
    sys.exit(main())
