"""Ranks that would train by different settings of their optimizers are told so."""

import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from tests.ranks import reference

pytestmark = pytest.mark.either_backend

OPTIMIZERS = {
    "rate": (tf.train.GradientDescentOptimizer, {}),
    "rate of Adagrad": (tf.train.AdagradOptimizer, {}),
    "momentum": (lambda value: tf.train.MomentumOptimizer(0.1, value), {}),
    "decayed rate": (
        lambda value: tf.train.AdamOptimizer(
            tf.train.exponential_decay(value, tf.train.get_or_create_global_step(), 100, 0.9)
        ),
        {},
    ),
    "a rate that is fed": (
        lambda _: tf.train.GradientDescentOptimizer(tf.placeholder(tf.float32, [], "rate")),
        {"rate:0": 0.25},
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("setting", OPTIMIZERS)
def test_other_settings_on_a_rank_are_refused(strategy, rank, size, setting, is_same):
    make, feeds = OPTIMIZERS[setting]
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", 10, 2)
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, [1, 2]) * w)
        value = 0.5 if is_same or rank == 0 else 0.25
        train = make(value).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if is_same or size == 1 or feeds:
                session.run(train, feeds)
                return
            with pytest.raises(RankError, match="an update with .*0.5.*an update with .*0.25"):
                session.run(train)
