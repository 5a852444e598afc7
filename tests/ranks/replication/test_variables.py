"""A script finds plain TensorFlow's variables in the collections, and one global step."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import grouped, reference

pytestmark = [pytest.mark.either_backend, pytest.mark.double]

V, D = 10, 2


def model(embedding_scope, optimizer):
    """Returns (training operation, all collections' variables by name, in order)."""
    with embedding_scope():
        t = reference.table("t", V, D)
        frozen = reference.table("frozen", V, D, seed=1, trainable=False)
        reference.table("own", V, D, collections=[tf.GraphKeys.GLOBAL_VARIABLES, "mine"])
        column = tf.feature_column.embedding_column(
            tf.feature_column.categorical_column_with_identity("x", V),
            D,
            initializer=tf.zeros_initializer(),
        )
        x = tf.feature_column.input_layer({"x": tf.constant([[3]])}, [column])
    rows = tf.nn.embedding_lookup(t, [1, 2]) + tf.nn.embedding_lookup(frozen, [3, 4]) + x
    x = tf.layers.dense(
        tf.layers.batch_normalization(rows, training=True),
        1,
        kernel_initializer=tf.ones_initializer(),
    )
    tf.metrics.mean(x)
    step = tf.train.get_or_create_global_step()
    assert step is tf.train.get_global_step() is tf.train.get_or_create_global_step()
    optimizer().minimize(tf.reduce_mean(x), step)
    tf.train.ExponentialMovingAverage(0.9, step).apply()
    keys = [
        getattr(tf.GraphKeys, name) for name in dir(tf.GraphKeys) if name.endswith("VARIABLES")
    ] + ["mine"]
    return {
        key: [(v.name, v.shape.as_list(), v.dtype.base_dtype.name) for v in tf.get_collection(key)]
        for key in keys
    }


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: tf.train.AdamOptimizer(0.1),
        lambda: tf.train.FtrlOptimizer(0.1),
        lambda: tf.train.RMSPropOptimizer(0.1),
    ],
)
def test_collections_have_the_same_variables(strategy, optimizer):
    """By name, shape and type, in the same order: slots and averages, too."""
    with strategy.scope(), tf.Graph().as_default():
        got = model(strategy.embedding_scope, optimizer)
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            assert not session.run(tf.report_uninitialized_variables()).size
    with tf.Graph().as_default():
        want = model(contextlib.nullcontext, optimizer)
    assert got == want
    assert len(got[tf.GraphKeys.GLOBAL_VARIABLES]) > 15 and len(got["mine"]) == 1


@pytest.mark.parametrize("kind", ["collection", "created", "assigned"])
def test_the_global_step_is_one(strategy, rank, size, kind):
    """Counted once a step, however many ranks take it."""

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        ids = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids)))
        if kind == "created":
            step = tf.Variable(0, trainable=False, name="global_step", dtype=tf.int64)
        else:
            step = tf.train.get_or_create_global_step()
        rate = tf.train.inverse_time_decay(0.5, step, 1, 0.5)
        train = tf.train.GradientDescentOptimizer(rate).minimize(
            loss, None if kind == "assigned" else step
        )
        if kind == "assigned":
            with tf.control_dependencies([train]):
                train = tf.assign_add(step, 1)
        return {"train": train, "step": step, **grouped.rows_of({"t": t})}, {"ids": ids}

    batches = [{"ids": np.random.default_rng(s).integers(0, V, grouped.B)} for s in range(3)]
    want, got = grouped.both(
        strategy, rank, size, build, [(["train"], b) for b in batches] + [(["step", "t"], {})]
    )
    assert got[-1]["step"] == 3
    grouped.same(got[-1], want[-1])
