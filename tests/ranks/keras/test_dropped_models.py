"""A model that nobody uses any more leaves memory, with its tables, slots and functions."""

from __future__ import annotations

import gc
import weakref

import pytest
import tensorflow as tf2

from collective import keras as collective_keras
from tests.ranks.keras.models import BATCH, data, dataset, keras, loss_of, make_model, part
from tests.ranks.keras.test_fit import compiled

pytestmark = [pytest.mark.either_backend, pytest.mark.double]


def fit(strategy, rank, size, eagerly=False):
    model = compiled(make_model(strategy.embedding_scope), keras.optimizers.Adam(0.01))
    model.run_eagerly = eagerly
    batches = dataset(part(data(4 * BATCH), rank, size), BATCH // size)
    model.fit(batches, epochs=2, verbose=0)
    model.evaluate(batches, verbose=0)
    return model


def fit_eagerly(strategy, rank, size):
    return fit(strategy, rank, size, eagerly=True)


def call_functions(strategy, rank, size):
    model = make_model(strategy.embedding_scope)
    model.optimizer = keras.optimizers.legacy.Adagrad(0.1)

    @tf2.function
    def step(users, words, labels):
        with tf2.GradientTape() as tape:
            loss = loss_of(model, users, words, labels)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    (users, words), labels = part(data(BATCH), rank, size)
    for records in (len(labels), len(labels) - 1):  # another shape is another function
        step(users[:records], words[:records], labels[:records])
    return model


def train_on_open_keys(strategy, rank, size):
    with strategy.embedding_scope():
        rows = collective_keras.layers.Embedding(4, combiner="sum")
    model = keras.Sequential([rows, keras.layers.Dense(1)])
    model.compile(keras.optimizers.legacy.Adam(0.01), "mse")
    (_, words), labels = part(data(4 * BATCH), rank, size)
    model.fit(dataset((words, labels), BATCH // size), epochs=2, verbose=0)
    return model


WAYS = [fit, fit_eagerly, call_functions, train_on_open_keys]


@pytest.mark.parametrize("train", WAYS, ids=[way.__name__ for way in WAYS])
def test_a_dropped_model_is_released(strategy, rank, size, train):
    with strategy.scope():
        model = train(strategy, rank, size)
        slots = model.optimizer.variables
        kept = [*model.variables, *(slots() if callable(slots) else slots)]
        assert len(kept) > 4
        held = [weakref.ref(each) for each in (model, *kept)]
        del model, slots, kept
        gc.collect()
        assert [str(each()) for each in held if each() is not None] == []


def test_a_model_is_called_after_the_session_is_cleared(strategy, rank, size):
    with strategy.scope():
        model = fit(strategy, rank, size)
        batches = dataset(part(data(2 * BATCH), rank, size), BATCH // size)
        before = model.evaluate(batches, verbose=0)
        keras.backend.clear_session()
        gc.collect()
        assert model.evaluate(batches, verbose=0) == before


def test_a_saved_model_is_released(strategy, rank, size, folder):
    with strategy.scope():
        model = fit(strategy, rank, size)
        tf2.train.Checkpoint(model=model).save(f"{folder}/checkpoint")
        model.save_weights(f"{folder}/weights.h5")
        strategy.export_saved_model(f"{folder}/exported", model=model)
        held = [weakref.ref(each) for each in (model, *model.variables)]
        del model
        gc.collect()
        assert [str(each()) for each in held if each() is not None] == []
