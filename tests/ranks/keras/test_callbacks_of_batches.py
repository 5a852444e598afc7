"""Keras's callbacks that look at single batches: all ranks decide alike, or are told why not."""

from __future__ import annotations

import numpy as np
import pytest

from collective.errors import RankError
from tests.ranks.keras.models import BATCH, STEPS, data, dataset, keras, make_model, part


class Stop(keras.callbacks.Callback):
    """Stops after a batch."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.last:
            self.model.stop_training = True


def fit(model, arrays, batch, callback, **options):
    """Returns the losses of epochs, and how many steps were made."""
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    history = model.fit(dataset(arrays, batch), epochs=3, verbose=0, callbacks=[callback])
    return history.history["loss"], int(model.optimizer.iterations.numpy())


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"steps_per_execution": 4}, marks=pytest.mark.slow),
        pytest.param({"run_eagerly": True}, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_terminate_on_nan_at_the_step_of_plain_keras(
    strategy, rank, size, value, options
):
    inputs, labels = data()
    labels[7 * BATCH + BATCH - 1] = value  # in the last rank's part of the eighth batch
    nan = keras.callbacks.TerminateOnNaN
    want, steps = fit(make_model(), (inputs, labels), BATCH, nan(), **options)
    assert steps == 8
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        own = part((inputs, labels), rank, size)
        got, made = fit(model, own, BATCH // size, nan(), **options)
        assert made == steps
        np.testing.assert_array_equal(got, want)
        labels[:] = 0  # The ranks go on.
        model = make_model(strategy.embedding_scope)
        _, made = fit(model, part((inputs, labels), rank, size), BATCH // size, nan(), **options)
        assert made == 3 * STEPS


def test_the_best_of_single_batches_is_refused(strategy, folder, rank, size):
    """On all ranks, also where one alone has the callback."""
    own = part(data(), rank, size)

    def checkpoint(**options):
        path = f"{folder}/best.weights.h5"
        return keras.callbacks.ModelCheckpoint(path, "loss", save_weights_only=True, **options)

    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        best = checkpoint(save_best_only=True, save_freq=3)
        if size == 1:
            assert fit(model, own, BATCH, best)[1] == 3 * STEPS
            return
        for callback in (best, best if rank else keras.callbacks.Callback()):
            kind = NotImplementedError if callback is best else RankError
            with pytest.raises(kind, match="save_freq=3.*Use save_freq='epoch'"):
                fit(model, own, BATCH // size, callback)
        for callback in (checkpoint(save_best_only=True), checkpoint(save_freq=30)):
            assert fit(model, own, BATCH // size, callback)[1] == 3 * STEPS


def test_a_stop_in_the_middle_of_an_epoch(strategy, rank, size):
    """At the same batch on all ranks, as in plain Keras; elsewhere the error says who did it."""
    want, steps = fit(make_model(), data(), BATCH, Stop(4))
    own = part(data(), rank, size)
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        got, made = fit(model, own, BATCH // size, Stop(4))
        assert made == steps == 5
        np.testing.assert_allclose(got, want, rtol=1e-5)
        if size == 1:
            return
        told = f"Rank {size - 1}: .*a callback set stop_training in the middle of an epoch"
        with pytest.raises(RankError, match=told) as raised:
            fit(model, own, BATCH // size, Stop(4 if rank == size - 1 else None))
        assert str(raised.value).count("stop_training in the middle") == 1
