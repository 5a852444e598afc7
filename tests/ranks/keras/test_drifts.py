"""A variable to which a Keras layer assigns what one rank alone knows is warned of, by name."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

from collective.ops.communication.horovod_library import hvd
from tests.ranks import grouped
from tests.ranks.keras.models import keras, part

X = np.arange(96, dtype=np.float32)[:, None]
Y = X[:, 0] / 96
BATCH = 24


class Centre(keras.layers.Layer):
    """Keeps a moving mean by itself, as batch normalisation by hand does."""

    def __init__(self, of_all_ranks=lambda x: x):
        super().__init__()
        self.of_all_ranks = of_all_ranks

    def build(self, shape):
        self.mean = self.add_weight("mean", [shape[-1]], initializer="zeros", trainable=False)
        self.steps = self.add_weight("steps", [], initializer="zeros", trainable=False)

    def call(self, x, training=None):
        if training:
            mean = self.of_all_ranks(tf2.reduce_mean(x, 0))
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            self.steps.assign_add(1.0)
        return x - self.mean


def fit(layer, data, batch):
    inputs = keras.Input([1])
    hidden = keras.layers.BatchNormalization()(layer(inputs))
    hidden = keras.layers.Dropout(0.0)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="zeros")(hidden))
    adam = keras.optimizers.Adam(1e-3, global_clipnorm=1.0, use_ema=True)
    model.compile(keras.mixed_precision.LossScaleOptimizer(adam), "mse", metrics=["mae"])
    model.fit(*data, batch_size=batch, shuffle=False, epochs=2, verbose=0)
    return layer


@pytest.mark.parametrize("is_mean", [False, True])
def test_a_layers_own_average_is_warned_of_unless_ranks_have_its_mean(
    strategy, rank, size, is_mean, caplog
):
    plain = fit(Centre(), (X, Y), BATCH)
    own = part((X, Y), rank, size, BATCH)
    with strategy.scope(), caplog.at_level("WARNING", logger="tensorflow"):
        tf2.get_logger().addHandler(caplog.handler)
        try:
            mean = hvd.allreduce if is_mean and size > 1 else lambda x: x
            layer = fit(Centre(mean), own, BATCH // size)
        finally:
            tf2.get_logger().removeHandler(caplog.handler)
    warned = [r.getMessage() for r in caplog.records if "drift apart" in r.getMessage()]
    warned = sorted({*grouped.everyone(warned)[0]})  # of rank 0, which speaks for all
    if is_mean or size == 1:
        assert warned == []
        np.testing.assert_allclose(layer.mean.numpy(), plain.mean.numpy(), rtol=1e-6)
    else:
        assert len(warned) == 1, warned
        assert f"'{layer.mean.name}'" in warned[0] and "'train_function'" in warned[0]
    assert layer.steps.numpy() == plain.steps.numpy()


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("option", [{"carrier": "horovod"}, {"deterministic": True}], ids=str)
def test_whichever_way_gradients_are_summed_they_are_the_same(strategy, rank, size, option, caplog):
    """By another carrier, or in the order of the ranks."""
    own = part((X, Y), rank, size, BATCH)
    with strategy.scope(**option), caplog.at_level("WARNING", logger="tensorflow"):
        tf2.get_logger().addHandler(caplog.handler)
        try:
            tf2.keras.utils.set_random_seed(1)
            fit(keras.layers.Dense(2, kernel_initializer="ones"), own, BATCH // size)
        finally:
            tf2.get_logger().removeHandler(caplog.handler)
    assert not [r.getMessage() for r in caplog.records if "drift apart" in r.getMessage()]


@pytest.mark.parametrize(
    ("decayed", "is_said"),
    [
        (lambda table, x, rate: 0.9 * table + 0.1 * tf2.reduce_mean(x), True),
        (lambda table, x, rate: table + tf2.random.uniform([5, 2]), True),
        (lambda table, x, rate: 0.9 * table + 0.1 * hvd.allreduce(tf2.reduce_mean(x)), False),
        (lambda table, x, rate: rate * table, False),
    ],
    ids=["data", "drawn", "mean", "number"],
)
def test_a_table_that_a_function_assigns_what_a_rank_alone_knows_is_warned_of(
    strategy, rank, size, decayed, is_said, caplog
):
    """Each row becomes what its owner knows. What all ranks have, or a number, needs no word."""
    with strategy.scope(), caplog.at_level("WARNING", logger="tensorflow"):
        with strategy.embedding_scope():
            table = keras.layers.Embedding(5, 2, embeddings_initializer="ones")
            table.build([])
        table = table.embeddings

        @tf2.function
        def step(x, rate):
            table.assign(decayed(table, x, rate), read_value=False)

        tf2.get_logger().addHandler(caplog.handler)
        try:
            step(tf2.fill([3], float(rank)), tf2.constant(0.5))
        finally:
            tf2.get_logger().removeHandler(caplog.handler)
    said = [*{r.getMessage() for r in caplog.records if "what its owner" in r.getMessage()}]
    assert len(said) == (is_said and size > 1 and rank == 0), said
    assert not said or f"'{table.name}'" in said[0] and "'step'" in said[0]


@pytest.mark.parametrize(
    ("factor", "is_said"),
    [
        (lambda x, rate, norm: 1.0 / tf2.reduce_sum(x), True),
        (lambda x, rate, norm: 1.0 / hvd.allreduce(tf2.reduce_sum(x)), False),
        (lambda x, rate, norm: rate, False),
        (lambda x, rate, norm: tf2.minimum(1.0, 1.0 / norm), False),
    ],
    ids=["data", "mean", "number", "norm"],
)
@pytest.mark.parametrize("legacy", [False, True], ids=["", "legacy"])
def test_a_tables_gradient_by_what_a_rank_alone_knows_is_warned_of(
    strategy, rank, size, factor, is_said, legacy, caplog
):
    """A factor of a rank's own would make a row's gradient depend on its owner.

    Norms of all ranks' gradients, means and numbers need no word.
    """
    with strategy.scope(), caplog.at_level("WARNING", logger="tensorflow"):
        with strategy.embedding_scope():
            table = keras.layers.Embedding(5, 2)
        dense = keras.layers.Dense(1)
        adam = (keras.optimizers.legacy if legacy else keras.optimizers).Adam(0.1)

        @tf2.function
        def step(ids, x, rate):
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_mean(dense(table(ids)) - x[:, None])
            weights = [table.embeddings, *dense.trainable_variables]
            gradients = tape.gradient(loss, weights)
            by = factor(x, rate, tf2.linalg.global_norm(gradients))
            gradients[0] = tf2.IndexedSlices(by * gradients[0].values, gradients[0].indices, [5, 2])
            adam.apply_gradients(zip(gradients, weights))

        tf2.get_logger().addHandler(caplog.handler)
        try:
            step(tf2.constant([1, 2, 4]), tf2.fill([3], rank + 1.0), tf2.constant(0.5))
        finally:
            tf2.get_logger().removeHandler(caplog.handler)
    said = {r.getMessage() for r in caplog.records if "which rank owns it" in r.getMessage()}
    assert len(said) == (is_said and size > 1 and rank == 0), said
    assert all("'step'" in text and "embeddings" in text for text in said)
