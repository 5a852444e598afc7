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
