"""A table has a gradient where the script's own graph connects it, whatever its group shares."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

ROWS = 20
IDS = np.random.default_rng(1).integers(0, ROWS, (4, 12))


def pooled(table, ids, weights=None):
    count = tf.shape(ids, out_type=tf.int64)[0]
    places = tf.stack([tf.range(count), tf.zeros([count], tf.int64)], 1)
    sparse = tf.SparseTensor(places, ids, tf.stack([count, tf.constant(1, tf.int64)]))
    if weights is not None:
        weights = tf.SparseTensor(places, weights, sparse.dense_shape)
    return tf.nn.embedding_lookup_sparse(table, sparse, weights, combiner="sum")


class Losses:
    """Two losses, of which the second uses only the rows of one table.

    Attributes:
        unused: what the second one doesn't depend on.
    """

    def __init__(self, scope, kind):
        self.ids = tf.placeholder(tf.int64, [None])
        with scope():
            user, item = (
                tf.get_variable(name, [ROWS, 2], initializer=tf.ones_initializer())
                for name in ("user", "item")
            )
        self.unused = [user]
        if kind == "rows":
            u, i = (tf.nn.embedding_lookup(t, self.ids) for t in (user, item))
        elif kind == "pooled":
            u, i = (pooled(t, self.ids) for t in (user, item))
        else:
            w = tf.get_variable("w", [1], initializer=tf.ones_initializer(), use_resource=True)
            u = pooled(user, self.ids, tf.fill([tf.size(self.ids)], 1.0) * w[0])
            i = pooled(item, self.ids)
            self.unused.append(w)
        target = tf.cast(self.ids % 3, tf.float32)
        self.both = tf.reduce_mean(tf.square(tf.reduce_sum(u * i, 1) - target))
        # Rows that only decide something have no gradient in TensorFlow either.
        stopped = 0 * tf.reduce_sum(tf.stop_gradient(u)) + tf.cast(tf.argmax(u[0]), tf.float32)
        self.one = tf.reduce_mean(tf.square(tf.reduce_sum(i, 1) - target)) + stopped


@pytest.mark.parametrize("kind", ["rows", "pooled", "weighted"])
@pytest.mark.parametrize("first", ["both", "one"])
def test_two_losses_of_one_optimizer(strategy, rank, size, kind, first):
    """Adam would move every row of a table whose gradient is zero, not missing."""

    def train(scope=contextlib.nullcontext, rank=0, size=1):
        with tf.Graph().as_default():
            losses, optimizer = Losses(scope, kind), tf.train.AdamOptimizer(0.1)
            order = ("both", "one") if first == "both" else ("one", "both")
            made = {name: optimizer.minimize(getattr(losses, name)) for name in order}
            assert tf.gradients(losses.one, losses.unused) == [None] * len(losses.unused)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for ids in IDS:
                    for name in ("both", "one"):
                        session.run(made[name], {losses.ids: ids[rank::size]})
                values = {v.op.name: v for v in tf.global_variables()}
                return session.run(values)

    plain = train()
    with strategy.scope(plan="quiet"):
        got = train(strategy.embedding_scope, rank, size)
    assert got.keys() == plain.keys()
    for name, want in plain.items():
        np.testing.assert_allclose(got[name], want, rtol=0, atol=2e-5, err_msg=name)


def test_slots_are_those_of_the_script(strategy):
    """An optimizer of one loss has none for the tables of the other."""

    def variables(scope=contextlib.nullcontext):
        with tf.Graph().as_default():
            losses = Losses(scope, "rows")
            tf.train.AdagradOptimizer(0.1).minimize(losses.both)
            tf.train.AdamOptimizer(0.1).minimize(losses.one)
            return {v.op.name for v in tf.global_variables()}

    plain = variables()
    with strategy.scope(plan="quiet"):
        assert variables(strategy.embedding_scope) == plain


def test_a_gradient_of_ragged_rows(strategy):
    """They consist of several tensors; so do those of a loss that TensorFlow adds up."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            user, item = (tf.get_variable(name, [ROWS, 2]) for name in ("user", "item"))
        ids = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
        u, i = (tf.nn.embedding_lookup(t, ids) for t in (user, item))
        both = tf.reduce_sum(u.values) + tf.reduce_sum(i.values)
        assert None not in tf.gradients(both, [user, item])
        of_user, of_item = tf.gradients(u, [user, item])
        assert of_user is not None and of_item is None
