"""Builds the model: an embedding table for each categorical column, and a small network.

The network takes the tables' rows and the numeric columns.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow.compat.v1 as tf

from census_income.columns import CATEGORICAL

HIDDEN_UNITS = (64, 32)


def create_tables(encoder, dim: int) -> dict:
    """Makes a table [V, dim] for each categorical column."""
    initializer = tf.random_uniform_initializer(-0.05, 0.05)
    return {
        column: tf.get_variable(column, [encoder.table_rows(column), dim], initializer=initializer)
        for column in CATEGORICAL
    }


class Network:
    """Makes its weights once, and builds the logits of as many input pipelines as call it."""

    def __init__(self, inputs: int):
        sizes = (inputs, *HIDDEN_UNITS, 1)
        kernel_values, bias_values = tf.glorot_uniform_initializer(), tf.zeros_initializer()
        self._layers = []
        for number, outputs in enumerate(sizes[1:]):
            with tf.variable_scope(f"dense_{number}"):
                shape = [sizes[number], outputs]
                kernel = tf.get_variable("kernel", shape, initializer=kernel_values)
                bias = tf.get_variable("bias", [outputs], initializer=bias_values)
            self._layers.append((kernel, bias))

    def __call__(self, batch: dict, tables: dict) -> tf.Tensor:
        """Builds the logits [B] of a batch."""
        embedded = [
            tf.nn.embedding_lookup(table, batch["ids"][column]) for column, table in tables.items()
        ]
        return self.logits([*embedded, batch["numeric"]])

    def logits(self, parts: list) -> tf.Tensor:
        """Builds the logits [B] of embeddings and numbers, [B, n] each."""
        values = tf.concat(parts, axis=1)
        for number, (kernel, bias) in enumerate(self._layers):
            values = tf.nn.bias_add(tf.matmul(values, kernel), bias)
            if number < len(HIDDEN_UNITS):
                # Smooth where it bends: at relu's bend the order of a sum, which N changes, could
                # decide a gradient.
                values = tf.nn.elu(values)
        return tf.squeeze(values, axis=1)


def create(strategy, encoder, dim: int) -> Callable[[dict], tf.Tensor]:
    """Makes the tables and the network; returns a function from a batch to its logits [B]."""
    with strategy.embedding_scope():  # what is made here is sharded, everything else replicated
        tables = create_tables(encoder, dim)
    network = Network(inputs=dim * len(tables) + encoder.width)
    return lambda batch: network(batch, tables)


def mean_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
