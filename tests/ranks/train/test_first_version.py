"""After tf.disable_v2_behavior a script's variables have values by name, and rules of their own."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import TableError
from tests.ranks import reference

pytestmark = pytest.mark.either_backend


@pytest.fixture(autouse=True)
def reference_variables():
    tf.disable_resource_variables()
    yield
    tf.enable_resource_variables()


class OfReferences(tf.train.GradientDescentOptimizer):
    """Has a rule for variables of TensorFlow's first version only."""

    def _apply_sparse(self, grad, var):
        return tf.scatter_sub(var, grad.indices, 0.5 * grad.values).op


class OfBoth(OfReferences):
    def _resource_apply_sparse(self, grad, var, indices):
        return tf.raw_ops.ResourceScatterSub(
            resource=var.handle, indices=indices, updates=0.5 * grad
        )


@pytest.mark.parametrize("placement", ["rows", "replicated"])
def test_a_rule_of_its_own_that_tensorflow_would_not_use(strategy, rank, size, placement):
    def trained(kind, scope=contextlib.nullcontext, rank=0, size=1):
        with tf.Graph().as_default():
            ids = tf.constant(np.arange(6)[rank::size])
            with scope():
                t = tf.get_variable("t", [6, 2], initializer=tf.ones_initializer())
            loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids)))
            train = kind(0.1).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train)
                return session.run(t)

    plain = trained(OfReferences)
    with strategy.scope(plan="quiet"):

        def scope():
            return strategy.embedding_scope(placement=placement)

        with pytest.raises(TableError, match="'t': OfReferences has _apply_sparse.*Define _resou"):
            trained(OfReferences, scope, rank, size)
        np.testing.assert_allclose(trained(OfBoth, scope, rank, size), plain, rtol=1e-6)


@pytest.mark.parametrize("placement", ["rows", "whole", "replicated"])
def test_values_by_name(strategy, rank, size, placement):
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        with strategy.embedding_scope(placement=placement):
            t = reference.table("t", 5, 2)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, [rank]))
        tf.train.AdagradOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            want = session.run(t)
            assert want.shape == (5, 2)
            named = {"name": "t:0", "tensor": graph.get_tensor_by_name("t:0"), "table": t}
            for got in session.run(named).values():
                np.testing.assert_array_equal(got, want)
            (only,) = session.run([v.name for v in tf.trainable_variables()])
            np.testing.assert_array_equal(only, want)


def test_a_dynamic_table_has_no_value(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [None, 2])
        tf.nn.embedding_lookup(t, [1])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(TableError, match="Fetching the value of table 't'"):
                session.run("t:0")
