"""Checks weights of lookups that the asking rank pools itself: they pass through the request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy

VALUES = np.random.default_rng(3).standard_normal((9, 3)).astype(np.float32)
IDS, SAMPLES, WEIGHTS = [4, 0, 4, 8, 2], [0, 0, 1, 1, 1], [0.5, 2, 1, -1, 3]


def loss_of(table: Any, weights: tf.Tensor) -> tf.Tensor:
    at = tf.constant(np.stack([SAMPLES, np.arange(5)], 1), tf.int64)
    shape = tf.constant([2, 5], tf.int64)
    ids = tf.placeholder_with_default(tf.constant(IDS, tf.int64), [None])
    rows = tf.nn.embedding_lookup_sparse(
        table, tf.SparseTensor(at, ids, shape), tf.SparseTensor(at, weights, shape), combiner="mean"
    )
    return tf.reduce_sum(rows**3)


def gradients(variable: Any, late: bool) -> list[np.ndarray]:
    """Returns the gradients of a table and of weights; those of weights, if they are late, are
    asked for once the lookup has been built.
    """
    weights = tf.placeholder_with_default(tf.constant(WEIGHTS, tf.float32), [None])
    loss = loss_of(variable, weights)
    found = (
        [*tf.gradients(loss, [variable]), *tf.gradients(loss, [weights])]
        if late
        else tf.gradients(loss, [variable, weights])
    )
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        of_table, of_weights = session.run(found)
    summed = np.zeros_like(VALUES)
    np.add.at(summed, of_table.indices, of_table.values)
    return [summed, of_weights]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.usefixtures("bound")
def test_weights_have_gradients(late: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLLECTIVE_STRATEGY", "hb")
    with tf.Graph().as_default():
        wanted = gradients(tf.get_variable("t", initializer=VALUES, use_resource=True), late)
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        with strategy.embedding_scope():
            table = tf.get_variable("t", initializer=VALUES)
        got = gradients(table, late)
        asks = [op for op in graph.get_operations() if op.type == "CollectiveAsk"]
    assert [op.get_attr("V") for op in asks] == [int(late)]
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
