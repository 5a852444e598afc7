"""Draws the rows that keys start from, and lists the optimizers that train dynamic tables."""

import numpy as np
import tensorflow.compat.v1 as tf

from collective import train
from collective.tables.rows import initializers

V, D, B = 20, 3, 12
EXTREME = np.array(
    [-(2**63), -(2**63) + 1, -(2**40), -1, 0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1],
    np.int64,
)
OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "nesterov": lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "adam": lambda: tf.train.AdamOptimizer(0.01),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
    "rmsprop": lambda: tf.train.RMSPropOptimizer(0.01),
    "centered": lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.9, centered=True),
    "adadelta": lambda: tf.train.AdadeltaOptimizer(1.0),
    "adagrad_da": lambda: tf.train.AdagradDAOptimizer(0.1, tf.train.get_or_create_global_step()),
    "proximal_sgd": lambda: tf.train.ProximalGradientDescentOptimizer(0.1, 0.01, 0.01),
    "proximal_adagrad": lambda: tf.train.ProximalAdagradOptimizer(
        0.1, l1_regularization_strength=0.01
    ),
}
# Those of `collective.train`.
MORE_OPTIMIZERS = {
    "row_wise_adagrad": lambda: train.RowWiseAdagradOptimizer(0.1),
    "adagrad_decay": lambda: train.AdagradDecayOptimizerV2(
        0.1, tf.train.get_or_create_global_step(), accumulator_decay_step=2
    ),
    "adam_async": lambda: train.AdamAsyncOptimizer(0.01),
    "adam_async_with_rmsprop": lambda: train.AdamAsyncOptimizer(0.01, apply_sparse_rmsprop=True),
    "adam_w": lambda: train.AdamWOptimizer(0.01, 0.01),
    "lazy_adam": lambda: train.LazyAdamOptimizer(0.01),
    "group_lasso_ftrl": lambda: train.GroupLassoFtrlOptimizer(0.1, l1_regularization_strength=0.1),
}


def normal():
    return tf.truncated_normal_initializer(stddev=0.5)


def drawn(keys, name="t", init=None, dim=D):
    """Draws the rows that keys start from, without any rank or table."""
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        fill = initializers.by_key(init or normal(), dim, name)
        return fill(np.asarray(keys, np.int64).view(np.uint64), dim).astype(np.float32)


def touch(table, keys):
    """Returns an update that trains these keys without moving them, and a lookup of them."""
    ids = tf.constant(np.asarray(keys, np.int64))
    rows = tf.nn.embedding_lookup(table, ids)
    return tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(rows)), rows
