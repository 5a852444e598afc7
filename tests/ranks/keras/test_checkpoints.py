"""Checkpoints of `fit` are a session's: training goes on at any number of ranks as plain Keras."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf2

import collective
from tests.ranks.keras.models import BATCH, compare, data, dataset, keras, make_model, part

pytestmark = pytest.mark.double

tf = tf2.compat.v1

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.003),
    "legacy Adam": lambda: keras.optimizers.legacy.Adam(0.003),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "legacy SGD": lambda: keras.optimizers.legacy.SGD(0.1, momentum=0.9),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


def compiled(optimizer, embedding_scope=None):
    keras.backend.clear_session()
    model = make_model() if embedding_scope is None else make_model(embedding_scope)
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def batches_of(first, last):
    """Returns the arrays of some batches of the data."""
    return tf2.nest.map_structure(lambda x: x[first * BATCH : last * BATCH], data())


def fit(model, first, last, rank, size, **options):
    own = dataset(part(batches_of(first, last), rank, size), BATCH // size)
    model.fit(own, verbose=0, **options)


def check(model, plain, rank, size):
    assert int(model.optimizer.iterations.numpy()) == int(plain.optimizer.iterations.numpy())
    compare(model, plain, rank, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [pytest.param(o, marks=[pytest.mark.matrix] * (o != "Adam")) for o in OPTIMIZERS]
)
def test_training_goes_on(strategy, rank, size, folder, optimizer):
    plain = compiled(optimizer)
    fit(plain, 0, 20, 0, 1)
    with strategy.scope():
        saved = collective.keras.callbacks.Checkpoint(folder, save_freq=3, max_to_keep=2)
        fit(compiled(optimizer, strategy.embedding_scope), 0, 10, rank, size, callbacks=[saved])
        kept = tf.train.get_checkpoint_state(folder).all_model_checkpoint_paths
        assert [os.path.basename(path) for path in kept] == ["model.ckpt-9", "model.ckpt-10"]
        again = compiled(optimizer, strategy.embedding_scope)
        fit(again, 10, 20, rank, size, callbacks=[collective.keras.callbacks.Checkpoint(folder)])
        check(again, plain, rank, size)
    latest = tf.train.latest_checkpoint(folder)
    assert tf2.train.load_variable(latest, "global_step") == 20


def train_in_session(strategy, make_optimizer, first, last, rank, size, folder):
    """Trains the model by a session, which restores and saves checkpoints in `folder`."""
    keras.backend.clear_session()
    own = part(batches_of(first, last), rank, size)
    with tf.Graph().as_default():
        iterator = tf.data.make_one_shot_iterator(dataset(own, BATCH // size))
        (users, words), labels = iterator.get_next()
        model = make_model(strategy.embedding_scope)
        loss = tf.reduce_mean((model([users, words])[:, 0] - labels) ** 2)
        step, optimizer = tf.train.get_or_create_global_step(), make_optimizer()
        gradients = tf.gradients(loss, model.trainable_variables)
        update = optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        with tf.control_dependencies([update]):
            train = step.assign_add(1)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
            while not session.should_stop():
                session.run(train)


@pytest.mark.slow
def test_a_sessions_model_goes_on_under_fit_and_back(strategy, rank, size, folder):
    """The session has a legacy optimizer; under `fit` it may be the new one."""
    plain = compiled("Adam")
    fit(plain, 0, 20, 0, 1)
    legacy = OPTIMIZERS["legacy Adam"]
    with strategy.scope():
        train_in_session(strategy, legacy, 0, 7, rank, size, folder)
        model = compiled("Adam", strategy.embedding_scope)
        saved = collective.keras.callbacks.Checkpoint(folder)
        fit(model, 7, 14, rank, size, callbacks=[saved])
        assert int(model.optimizer.iterations.numpy()) == 14
        train_in_session(strategy, legacy, 14, 20, rank, size, folder)
        last = compiled("legacy Adam", strategy.embedding_scope)
        assert saved.restore(last) == 20
        check(last, plain, rank, size)


@pytest.mark.matrix
def test_slots_of_tensorflow_1s_optimizers(strategy, rank, size, folder):
    with strategy.scope():
        train_in_session(
            strategy, lambda: tf.train.AdamOptimizer(0.003, epsilon=1e-7), 0, 8, rank, size, folder
        )
        model = compiled("Adam", strategy.embedding_scope)
        fit(model, 8, 20, rank, size, callbacks=[collective.keras.callbacks.Checkpoint(folder)])
    plain = compiled("Adam")
    fit(plain, 0, 20, 0, 1)
    check(model, plain, rank, size)


@pytest.mark.slow
def test_what_does_not_fit_changes_nothing(strategy, rank, size, folder):
    callback = collective.keras.callbacks.Checkpoint
    with strategy.scope():
        model = compiled("Adam", strategy.embedding_scope)
        saved = callback(folder, continue_id="one")
        assert saved.restore(model) is None
        fit(model, 0, 2, rank, size, epochs=2, callbacks=[saved])
        # Another training takes weights and steps, and trains all of its epochs.
        fit(model, 2, 4, rank, size, callbacks=[callback(folder, continue_id="two")])
        assert int(model.optimizer.iterations.numpy()) == 6
        # The same one has no epoch left.
        fit(model, 4, 6, rank, size, callbacks=[callback(folder, continue_id="two")])
        assert int(model.optimizer.iterations.numpy()) == 6

        keras.backend.clear_session()
        with strategy.embedding_scope():
            other = keras.Sequential(
                [keras.layers.Embedding(7, 2, name="embedding"), keras.layers.Dense(1)]
            )
            other.build([None])
        other.compile("adam", "mse")
        before = other.layers[1].kernel.numpy()
        with pytest.raises(tf.errors.OpError, match=r"\[7, 2\] here, \[50, 8\] in the checkpoint"):
            saved.restore(other)
        np.testing.assert_array_equal(other.layers[1].kernel.numpy(), before)
        with pytest.raises(ValueError, match="'unbuilt' has no weights yet"):
            saved.restore(keras.Sequential([keras.layers.Dense(1)], name="unbuilt"))
        twins = [keras.layers.Dense(1, name="twin") for _ in range(2)]
        nested = keras.Sequential([keras.Sequential([twins[0]]), keras.Sequential([twins[1]])])
        nested.build([None, 2])
        nested.compile("sgd", "mse")
        with pytest.raises(
            ValueError, match=r"Two variables are called 'twin/kernel', \(2, 1\) and"
        ):
            saved.save(nested)
        with pytest.raises(ValueError, match="save_freq='hourly'"):
            callback(folder, save_freq="hourly")
        with tf.Graph().as_default(), pytest.raises(NotImplementedError, match="eager models"):
            saved.restore(None)


@pytest.mark.slow
def test_a_saved_model_is_plain_keras_in_plain_tensorflow(strategy, rank, size, folder):
    (users, words), _ = batches_of(0, 1)
    plain = compiled("Adagrad")
    fit(plain, 0, 5, 0, 1)
    with strategy.scope():
        model = compiled("Adagrad", strategy.embedding_scope)
        fit(model, 0, 5, rank, size)
        path = strategy.export_saved_model(folder, model=model)
        with pytest.raises(TypeError, match="functional or sequential Keras model.*not Model"):
            strategy.export_saved_model(folder, model=keras.Model())
        with pytest.raises(TypeError, match="model or signature_def_fn"):
            strategy.export_saved_model(folder, signature_def_fn=dict, model=model)
    if rank == 0:
        assert os.listdir(folder) == [os.path.basename(path)]  # no checkpoint is left
    served = tf2.saved_model.load(path).signatures["serving_default"]
    inputs = dict(zip(model.input_names, map(tf2.constant, (users, words))))
    (answer,) = served(**inputs).values()
    np.testing.assert_allclose(answer, plain([users, words]), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_fits_of_a_script_are_told_apart(strategy, rank, size, folder):
    """A second one trains. In a script that starts again, both are over."""
    plain = compiled("Adam")
    fit(plain, 0, 4, 0, 1, epochs=2)
    fit(plain, 4, 8, 0, 1)
    with strategy.scope():
        for _ in range(3):
            model = compiled("Adam", strategy.embedding_scope)
            saved = collective.keras.callbacks.Checkpoint(folder, continue_id="one")
            fit(model, 0, 4, rank, size, epochs=2, callbacks=[saved])
            fit(model, 4, 8, rank, size, callbacks=[saved])
            check(model, plain, rank, size)


@pytest.mark.slow
def test_an_epoch_of_unknown_length_is_over_when_it_is_validated(strategy, rank, size, folder):
    """Its last step was saved, and the job ends in the validation."""

    class Ends(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            raise KeyError("boom")

    def train(model, *callbacks):
        saved = collective.keras.callbacks.Checkpoint(folder, save_freq=4, continue_id="one")
        own = dataset(part(batches_of(0, 4), rank, size), BATCH // size)
        own = own.filter(lambda *_: True)  # nobody knows its length now
        model.fit(own, verbose=0, epochs=2, validation_data=own, callbacks=[saved, *callbacks])

    plain = compiled("Adam")
    fit(plain, 0, 4, 0, 1, epochs=2)
    with strategy.scope():
        with pytest.raises(KeyError, match="boom"):
            train(compiled("Adam", strategy.embedding_scope), Ends())
        model = compiled("Adam", strategy.embedding_scope)
        train(model)
        check(model, plain, rank, size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["repeated", "generator"])
def test_data_that_go_on_from_epoch_to_epoch(strategy, rank, size, folder, kind):
    """An epoch of 3 steps begins where the one before it ended, also in a script that goes on."""
    own = part(batches_of(0, 20), rank, size)

    def fit_epochs(model, epochs, arrays, batch, **options):
        x = dataset(arrays, batch).repeat()
        if kind == "generator":
            x = x.as_numpy_iterator()
        model.fit(x, steps_per_epoch=3, epochs=epochs, initial_epoch=1, verbose=0, **options)

    plain = compiled("Adam")
    fit_epochs(plain, 8, batches_of(0, 20), BATCH)
    with strategy.scope():
        for epochs, save_freq in ((3, "epoch"), (5, 2), (8, "epoch")):
            model = compiled("Adam", strategy.embedding_scope)
            saved = collective.keras.callbacks.Checkpoint(
                folder, save_freq=save_freq, continue_id="one"
            )
            fit_epochs(model, epochs, own, BATCH // size, callbacks=[saved])
        check(model, plain, rank, size)
