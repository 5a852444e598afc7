"""A loss for each sample is warned of: TensorFlow minimizes the sum, of which a rank has a part."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from tests.ranks import reference
from tests.ranks.assignments import warnings
from tests.ranks.keras.models import keras

pytestmark = pytest.mark.either_backend

# How a loss comes about, and whether it is one for each sample.
LOSSES = {
    "any number of samples": (True, lambda rows: tf.reduce_sum(rows, 1)),
    "a known number of samples": (True, lambda rows: tf.ensure_shape(tf.reduce_sum(rows, 1), [3])),
    "no static shape": (True, lambda rows: tf.placeholder_with_default(rows, None)),
    "the mean": (False, tf.reduce_mean),
    "several means": (False, lambda rows: tf.reduce_mean(rows, 0)),
}


ADVICE = "Minimize its mean"


@pytest.mark.sample(3)
@pytest.mark.parametrize("by_tf_gradients", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_for_each_sample_is_warned_of(strategy, rank, size, kind, by_tf_gradients):
    is_per_sample, make = LOSSES[kind]
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", 10, 2)
        loss = make(tf.nn.embedding_lookup(table, tf.placeholder(tf.int64, [None])))
        optimizer = tf.train.AdamOptimizer(0.1)
        with warnings(ADVICE) as said:
            for _ in range(2):
                if by_tf_gradients:
                    optimizer.apply_gradients([(tf.gradients(loss, [table])[0], table)])
                else:
                    optimizer.minimize(loss)
    assert len(said) == (size > 1 and rank == 0 and is_per_sample)
    assert all(f"'{loss.op.name}'" in text and f"1/{size} of" in text for text in said)


@pytest.mark.parametrize("is_function", [False, True])
def test_a_tape_warns_of_it(strategy, rank, size, is_function):
    with strategy.scope(plan="quiet"), warnings(ADVICE) as said:
        layer = keras.layers.Dense(1)
        x = np.ones([5, 3], np.float32)
        layer.build(x.shape)

        def step(x, reduce=lambda loss: loss):
            with tf2.GradientTape() as tape:
                loss = reduce(tf2.square(layer(x))[:, 0])
            return tape.gradient(loss, layer.trainable_variables)

        take = tf2.function(step, autograph=False) if is_function else step
        take(x, tf2.reduce_mean)
        assert not said
        for _ in range(2):
            take(x)
    assert len(said) == (size > 1 and rank == 0)
