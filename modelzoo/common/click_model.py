"""Has what models of clicks have in common: tables, inputs, loss, and the served signature."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from common import click_log
from common.click_log import CATEGORICAL, DENSE
from common.click_options import ClickOptions, Defaults
from common.click_source import GeneratedSource, Source, load
from common.training_course import TrainingCourse

INITIAL = 0.05  # the largest that a number in a new row may be
Features = dict[str, tf.Tensor]


class ClickModel:
    """Builds a model of clicks; subclasses give `defaults` and `logits`.

    Everything is built in the variable scope that is open, and found there when it is built again.

    Args:
        options: of the program.
        table_rows: of the categorical columns.
        embedding_scope: opens the scope in which variables are tables. With
            `contextlib.nullcontext` the model is one of plain TensorFlow.
    """

    defaults: Defaults

    def __init__(
        self,
        options: ClickOptions,
        table_rows: tuple[int, ...],
        embedding_scope: Callable[[], AbstractContextManager],
    ):
        self.options, self.table_rows = options, table_rows
        self.embedding_scope = embedding_scope

    @classmethod
    def source(cls, options: ClickOptions, fail: Callable[[str], Any]) -> Source:
        """Opens the data that the options ask for."""
        return load(
            options.data,
            options.buckets,
            lambda: GeneratedSource(click_log.generate(options.rows)),
            fail,
        )

    def logits(self, features: Features) -> tf.Tensor:
        """Builds the logits [B] of a batch."""
        raise NotImplementedError

    def loss(self, features: Features) -> tf.Tensor:
        """Builds the loss that training minimises, a mean over the batch."""
        return mean_log_loss(features["label"], self.logits(features))

    def metrics(self, features: Features) -> dict[str, Any]:
        """Makes TensorFlow's (value, update) pairs 'auc' and 'log_loss', over all ranks' rows."""
        labels, logits = features["label"], self.logits(features)
        log_losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
        return {
            "auc": tf.metrics.auc(labels, tf.sigmoid(logits), num_thresholds=2000),
            "log_loss": tf.metrics.mean(log_losses),
        }

    def course(self, rank: int, ranks: int) -> TrainingCourse:
        """Makes what records the course of training; here one that records nothing."""
        return TrainingCourse(None, None, rank, ranks)

    def placeholders(self) -> Features:
        """Makes the inputs of the served model."""
        return {
            "dense": tf.placeholder(tf.float32, [None, DENSE], name="dense"),
            "categorical": tf.placeholder(tf.int64, [None, CATEGORICAL], name="categorical"),
        }

    def table(self, column: int, dim: int, prefix: str = "") -> tf.Variable:
        """Makes a categorical column's table, or finds it where it was made before."""
        with self.embedding_scope():
            return tf.get_variable(
                f"{prefix}C{column + 1}",
                [self.table_rows[column], dim],
                initializer=first_rows(),
            )

    def row_numbers(self, features: Features, column: int) -> tf.Tensor:
        """Returns the rows [B] of a column's ids: what remains of hashes, and other ids as is."""
        return tf.math.floormod(features["categorical"][:, column], self.table_rows[column])

    def embedded(self, features: Features, columns: range, dim: int) -> list[tf.Tensor]:
        """Looks up columns in their tables; returns [B, dim] for each."""
        return [
            tf.nn.embedding_lookup(self.table(column, dim), self.row_numbers(features, column))
            for column in columns
        ]


def first_rows() -> Any:
    """Returns what fills new rows of tables."""
    return tf.random_uniform_initializer(-INITIAL, INITIAL)


def levels(features: Features) -> tf.Tensor:
    """Returns the counts [B, 13] on a scale on which large ones don't outweigh all others."""
    return tf.log1p(tf.maximum(features["dense"], 0.0)) - 1.5


def mean_log_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
