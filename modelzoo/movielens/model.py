"""Builds the model: does a user give a movie at least four stars?

A user and a movie have a row each in a dynamic table: a number of their own (how mild, how good)
and `dim` tastes.

    logit = bias + own(user) + own(movie) + sum(tastes(user) * tastes(movie))

No vocabulary is given anywhere, and ids are strings as they come: a row is made when training meets
its id for the first time. Elsewhere an id that training hasn't met has a row of zeros, so that the
other's number decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective import estimator as estimators
from collective import feature_column as collective_columns
from common import optimizers
from movielens.ratings import HIGH

INITIAL = 0.1  # the largest that a number in a new row may be


def make_model_fn(
    strategy: CollectiveStrategy, hooks: Callable[[tf.Tensor], list]
) -> Callable[..., Any]:
    """Makes the model_fn for `strategy.estimator`.

    Its params are 'dim', 'l2', 'optimizer' and 'learning_rate'. `hooks` makes the hooks of
    training, given the loss.
    """

    def model_fn(features: dict, labels: None, mode: str, params: dict) -> estimators.EstimatorSpec:
        del labels  # they are the ratings among the features, as in movie_lens
        with strategy.embedding_scope():
            rows = [
                tf.feature_column.input_layer(features, [embedding_column(key, params["dim"])])
                for key in ("user_id", "movie_id")
            ]
        bias = tf.get_variable("bias", [], initializer=tf.zeros_initializer())
        (user, user_tastes), (movie, movie_tastes) = [
            tf.split(row, [1, params["dim"]], axis=1) for row in rows
        ]
        logits = bias + tf.squeeze(user + movie, 1)
        logits += tf.reduce_sum(user_tastes * movie_tastes, axis=1)
        probability = tf.sigmoid(logits)
        if mode == estimators.ModeKeys.PREDICT:
            return estimators.EstimatorSpec(mode, predictions={"probability": probability})

        high = tf.cast(features["user_rating"] >= HIGH, tf.float32)
        log_loss = tf.nn.sigmoid_cross_entropy_with_logits(labels=high, logits=logits)
        if mode == estimators.ModeKeys.EVAL:
            mean_loss = tf.reduce_mean(log_loss)
            metrics = {
                "auc": tf.metrics.auc(high, probability, num_thresholds=2000),
                # of all ratings; 'loss' is a mean of the batches' means
                "log_loss": tf.metrics.mean(log_loss),
            }
            return estimators.EstimatorSpec(mode, loss=mean_loss, eval_metric_ops=metrics)

        squares = tf.add_n([tf.reduce_sum(tf.square(row), axis=1) for row in rows])
        loss = tf.reduce_mean(log_loss + params["l2"] * squares)
        optimizer = optimizers.create(params["optimizer"], params["learning_rate"])
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
        return estimators.EstimatorSpec(
            mode, loss=loss, train_op=train_op, training_hooks=hooks(loss)
        )

    return model_fn


def embedding_column(key: str, dim: int) -> Any:
    """Makes a column [B, 1 + dim] for ids of any number."""
    ids = collective_columns.categorical_column_with_embedding(key, dtype=tf.string)
    return tf.feature_column.embedding_column(
        ids, 1 + dim, initializer=tf.random_uniform_initializer(-INITIAL, INITIAL)
    )


def serving_input() -> estimators.export.ServingInputReceiver:
    """Makes the inputs of the exported model: ids [B] of users and of movies, strings."""
    ids = {key: tf.placeholder(tf.string, [None], name=key) for key in ("user_id", "movie_id")}
    return estimators.export.ServingInputReceiver(ids, ids)
