"""What eager Keras models save is what plain Keras saves, whole tables, at any number of ranks."""

from __future__ import annotations

import copy
import functools
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf2

from collective.errors import TableError
from tests.ranks.keras.models import (
    BATCH,
    batches,
    compare,
    data,
    dataset,
    keras,
    make_model,
    part,
    train_step,
    weights_of,
)

pytestmark = pytest.mark.double

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.003),
    "legacy Adam": lambda: keras.optimizers.legacy.Adam(0.003),
}


def trained(model, optimizer, own):
    step = train_step(model, optimizer)
    for batch in own:
        step(*batch)


@pytest.mark.either_backend
@pytest.mark.parametrize("file", ["weights.h5", "all.weights.h5", "weights"])
def test_weights_go_to_plain_keras_and_back(strategy, rank, size, folder, file):
    path = os.path.join(folder, file)
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        trained(model, keras.optimizers.Adagrad(0.1), batches(part(data(), rank, size), size)[:3])
        model.save_weights(path)
        other = make_model(strategy.embedding_scope)
        other.load_weights(path)
        for own, loaded in zip(weights_of(model, rank, size), weights_of(other, rank, size)):
            np.testing.assert_array_equal(loaded, own)
    plain = make_model()
    plain.load_weights(path)
    compare(model, plain, rank, size, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["Adam", pytest.param("legacy Adam", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("file", ["model.keras", "weights"])
def test_training_goes_on_with_the_slots(strategy, rank, size, folder, optimizer, file):
    """Also in a model whose slots are made after it was loaded."""
    if (optimizer, file) == ("legacy Adam", "model.keras"):
        return  # plain Keras doesn't save its slots either
    path, all_data = os.path.join(folder, file), data()
    plain, plain_optimizer = make_model(), OPTIMIZERS[optimizer]()
    trained(plain, plain_optimizer, batches(all_data)[:8])
    own = batches(part(all_data, rank, size), size)
    with strategy.scope():
        model, made = make_model(strategy.embedding_scope), OPTIMIZERS[optimizer]()
        model.compile(made, "mse")
        trained(model, made, own[:4])
        if file == "model.keras":
            keras.models.save_model(model, path)  # It is model.save(path).
            with strategy.embedding_scope():
                other = keras.models.load_model(path)
        else:
            model.save_weights(path)
            other = make_model(strategy.embedding_scope)
            other.compile(OPTIMIZERS[optimizer](), "mse")
            other.load_weights(path)
        trained(other, other.optimizer, own[4:8])
        assert int(other.optimizer.iterations.numpy()) == 8
    compare(other, plain, rank, size)


def test_a_model_checkpoint_and_what_is_refused(strategy, rank, size, folder):
    path = os.path.join(folder, "best.h5")
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        model.compile("adagrad", "mse")
        model.fit(
            dataset(part(data(), rank, size), BATCH // size),
            epochs=2,
            verbose=0,
            callbacks=[
                keras.callbacks.ModelCheckpoint(
                    path, monitor="loss", save_best_only=True, save_weights_only=True
                )
            ],
        )
        if size > 1:
            with pytest.raises(TableError, match="A SavedModel of table"):
                module = tf2.Module()
                module.table = model.trainable_variables[0]
                tf2.saved_model.save(module, os.path.join(folder, f"saved{rank}"))
            for save in (model.save, functools.partial(keras.models.save_model, model)):
                with pytest.raises(TableError, match="A SavedModel of the Keras model 'model"):
                    save(os.path.join(folder, "saved"), save_format="tf")
    plain = make_model()
    plain.load_weights(path)
    compare(model, plain, rank, size, 0)


def test_copies_of_models(strategy, size):
    """Each rank copies one without tables by itself; of tables it has a part only."""
    with strategy.scope():
        plain = keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])
        copied = copy.deepcopy(plain)
        np.testing.assert_array_equal(copied.get_weights()[0], plain.get_weights()[0])
        model = make_model(strategy.embedding_scope)
        if size == 1:
            return
        for copier in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TableError, match=r"clone_model\(model\)"):
                copier(model)
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        for weights in zip(clone.get_weights(), model.get_weights()):
            np.testing.assert_array_equal(*weights)
