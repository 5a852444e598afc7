"""Rows that are fetched with an update of their table, and known only after the gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

pytestmark = [pytest.mark.backends("hb", "sok"), pytest.mark.ranks(3)]


def test_ids_that_depend_on_rows_come_after_the_gradients(strategy, rank, size):
    """No gradient waits for rows whose gate waits for it."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [12, 2], initializer=tf.ones_initializer())
        rows = tf.nn.embedding_lookup(table, tf.range(rank, 12, dtype=tf.int64))
        train = tf.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum(rows))
        later = tf.numpy_function(lambda rows: np.arange(12), [rows], tf.int64)
        later.set_shape([None])
        later_rows = tf.nn.embedding_lookup(table, later)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(3):
                session.run([later_rows, train])
            # Each rank's gradients are ones from its own number on; the table has their mean.
            value = 1 - 1.5 * np.minimum(np.arange(12) + 1, size) / size
            np.testing.assert_allclose(session.run(later_rows)[:, 0], value, rtol=1e-6, atol=1e-6)


def test_rows_whose_values_nobody_looks_at_come_all_the_same(strategy, rank, size):
    """TensorFlow would drop their exchange, for which the gradients wait."""
    with strategy.scope(plan="quiet", grouping=False), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [12, 2], initializer=tf.ones_initializer())
        rows = tf.nn.embedding_lookup(table, tf.range(rank, 12, dtype=tf.int64))
        train = tf.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum(rows))
        rows = tf.group(tf.nn.embedding_lookup(table, [1, 2]))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(3):
                session.run([rows, train])
