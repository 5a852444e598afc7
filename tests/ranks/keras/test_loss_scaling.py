"""Keras's optimizers that scale the loss: all ranks take a step or none does."""

import numpy as np
import pytest
import tensorflow as tf2

import collective
from tests.ranks.keras.models import BATCH, compare, data, dataset, keras, make_model, part

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3), pytest.mark.double]


def test_a_dynamic_scale_and_a_dynamic_table_are_refused(strategy):
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with strategy.scope():
        ids = keras.Input([1], dtype="int64")
        rows = collective.keras.layers.Embedding(2)(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        model.compile(optimizer, "mse")
        with pytest.raises(NotImplementedError, match="Make it with dynamic=False"):
            model.train_on_batch(np.array([[1], [2]]), np.ones([2, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.legacy.Adagrad])
def test_fit_skips_the_steps_of_one_process(strategy, rank, size, kind):
    """The labels of one sample, on the last rank, overflow: its rows' owners alone see it there."""
    ids, labels = data()
    labels[[3 * BATCH - 1, 9 * BATCH - 1]] = 1e38

    def trained(arrays, batch, *scope):
        model = make_model(*scope)
        scaling = keras.mixed_precision.LossScaleOptimizer
        options = {"initial_scale": 1024.0, "dynamic_growth_steps": 4}
        model.compile(scaling(kind(0.01), **options), "mse")
        model.fit(dataset(arrays, batch), epochs=1, verbose=0)
        return model

    plain = trained((ids, labels), BATCH)
    with strategy.scope():
        own = part((ids, labels), rank, size)
        model = trained(own, BATCH // size, strategy.embedding_scope)
        compare(model, plain, rank, size)
    # Halved in the third and the ninth step, doubled after four good ones.
    assert [float(each.optimizer.loss_scale) for each in (model, plain)] == [2048, 2048]
    iterations = [int(each.optimizer.inner_optimizer.iterations) for each in (model, plain)]
    assert iterations[0] == iterations[1] and np.isfinite(plain.get_weights()[0]).all()


@pytest.mark.parametrize("by_tape", [False, True], ids=["fit", "tape"])
def test_half_precision_overflows_where_one_process_does(strategy, rank, size, by_tape):
    """A sample counts N times as much in the mean of its rank's batch, and must not overflow for
    that: the error of each batch's first one is just small enough for the mean of the whole batch.
    """
    ids, labels = data(4 * BATCH)
    labels = np.where(np.arange(4 * BATCH) % BATCH == 0, 16.0, 0.0).astype(np.float32)

    def trained(arrays, batch, *scope):
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            model = make_model(*scope)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        scaling = keras.mixed_precision.LossScaleOptimizer
        model.compile(scaling(keras.optimizers.SGD(0.001)), "mse")
        if not by_tape:
            model.fit(dataset(arrays, batch), epochs=1, verbose=0)
            return model
        optimizer = model.optimizer

        @tf2.function
        def step(ids, labels):
            with tf2.GradientTape() as tape:
                error = model(ids)[:, 0] - tf2.cast(labels, tf2.float16)
                loss = optimizer.get_scaled_loss(tf2.reduce_mean(tf2.square(error)))
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients = optimizer.get_unscaled_gradients(gradients)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        for each in dataset(arrays, batch):
            step(*each)
        return model

    plain = trained((ids, labels), BATCH)
    with strategy.scope():
        own = part((ids, labels), rank, size)
        model = trained(own, BATCH // size, strategy.embedding_scope)
        scales = [float(each.optimizer.loss_scale) for each in (model, plain)]
        assert scales == [2**15, 2**15]
        compare(model, plain, rank, size, 2e-3)
