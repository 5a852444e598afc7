"""The model: one embedding table for each categorical column, and a small network over their rows
and the numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow.compat.v1 as tf
from columns import CATEGORICAL

HIDDEN_UNITS = (64, 32)


def optimizer(name: str, learning_rate: float) -> tf.train.Optimizer:
    if name == "momentum":
        return tf.train.MomentumOptimizer(learning_rate, momentum=0.9)
    classes = {
        "adadelta": tf.train.AdadeltaOptimizer,
        "adagrad": tf.train.AdagradOptimizer,
        "adam": tf.train.AdamOptimizer,
        "ftrl": tf.train.FtrlOptimizer,
        "rmsprop": tf.train.RMSPropOptimizer,
        "sgd": tf.train.GradientDescentOptimizer,
    }
    return classes[name](learning_rate)


def create_tables(encoder, dim: int) -> dict:
    """For each categorical column a table [V, dim]."""
    initializer = tf.random_uniform_initializer(-0.05, 0.05)
    return {
        column: tf.get_variable(column, [encoder.table_rows(column), dim], initializer=initializer)
        for column in CATEGORICAL
    }


class Network:
    """Makes its weights once; calling it builds the logits [B] of a batch, as often as there are
    input pipelines.
    """

    def __init__(self, inputs: int):
        sizes = (inputs, *HIDDEN_UNITS, 1)
        self._layers = []
        for number, outputs in enumerate(sizes[1:]):
            with tf.variable_scope(f"dense_{number}"):
                self._layers.append(
                    (
                        tf.get_variable(
                            "kernel",
                            [sizes[number], outputs],
                            initializer=tf.glorot_uniform_initializer(),
                        ),
                        tf.get_variable("bias", [outputs], initializer=tf.zeros_initializer()),
                    )
                )

    def __call__(self, batch: dict, tables: dict) -> tf.Tensor:
        embedded = [
            tf.nn.embedding_lookup(table, batch["ids"][column]) for column, table in tables.items()
        ]
        values = tf.concat([*embedded, batch["numeric"]], axis=1)
        for number, (kernel, bias) in enumerate(self._layers):
            values = tf.nn.bias_add(tf.matmul(values, kernel), bias)
            if number < len(HIDDEN_UNITS):
                # Smooth where it bends: at relu's bend the order of a sum, which N changes, could
                # decide a gradient.
                values = tf.nn.elu(values)
        return tf.squeeze(values, axis=1)


def create(strategy, encoder, dim: int) -> Callable[[dict], tf.Tensor]:
    """The tables and the network; calling it builds the logits [B] of a batch."""
    with strategy.embedding_scope():  # what is made here is sharded, everything else replicated
        tables = create_tables(encoder, dim)
    network = Network(inputs=dim * len(tables) + encoder.width)
    return lambda batch: network(batch, tables)


def mean_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
