"""Compares training rows times a dense matrix with plain TensorFlow on the global batch."""

import numpy as np
import tensorflow.compat.v1 as tf

from tests.ranks import reference

B = 12
IDS = np.random.default_rng(0).integers(0, 9, B)
X = np.random.default_rng(1).normal(size=(B, 3)).astype(np.float32)


def model(embedding_scope, train, rows=9, dim=3):
    """Multiplies rows of a table by a matrix; `train(loss, variables)` returns more fetches."""
    with embedding_scope():
        t = reference.table("t", rows, dim)
    w = tf.get_variable("w", initializer=reference.table_values(3, 2, 1))
    ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, 3])
    emb = tf.nn.embedding_lookup(t, ids)
    loss = tf.reduce_mean(tf.square(tf.matmul(emb * x, w)) + emb[:, :2])
    fetches = {
        "emb": emb,
        "loss": loss,
        "w": w.read_value(),
        "rows": tf.nn.embedding_lookup(t, tf.range(rows)),
    }
    fetches.update(train(loss, [t, w]))
    return fetches, {"ids": ids, "x": x}


def compare(strategy, rank, size, train, steps=3, names=("train",), rtol=2e-5):
    def build(embedding_scope):
        return model(embedding_scope, train)

    def runs(ids, x):
        return [(names, {"ids": ids, "x": x})] * steps + [(["rows", "w"], {})]

    want = reference.plain(build, runs(IDS, X))
    got = reference.sharded(
        strategy, build, runs(reference.part(IDS, rank, size), reference.part(X, rank, size))
    )
    for name in ("rows", "w"):
        np.testing.assert_allclose(
            got[-1][name], want[-1][name], rtol=rtol, atol=1e-6, err_msg=name
        )
    return want, got


def overflowing_in_step_1(table):
    """Returns 0, of which the gradient of row 3 is infinite in step 1; and the step."""
    step = tf.get_variable("step", initializer=0, trainable=False)
    largest = tf.where_v2(tf.equal(step, 1), np.float32(np.inf), 0.0)

    @tf.custom_gradient
    def overflowing(rows):
        return 0 * tf.reduce_sum(rows), lambda _: largest + tf.zeros_like(rows)

    return overflowing(tf.nn.embedding_lookup(table, [3])), step


OPTIMIZERS = {
    "adagrad_da": lambda: tf.train.AdagradDAOptimizer(
        0.1, tf.train.get_or_create_global_step(), l1_regularization_strength=0.001
    ),
    "proximal_adagrad": lambda: tf.train.ProximalAdagradOptimizer(
        0.1, l1_regularization_strength=0.001
    ),
    "proximal_sgd": lambda: tf.train.ProximalGradientDescentOptimizer(
        0.1, l1_regularization_strength=0.001, l2_regularization_strength=0.01
    ),
    "centered_rmsprop": lambda: tf.train.RMSPropOptimizer(0.01, centered=True),
    "nesterov": lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: tf.train.AdamOptimizer(0.01),
}
