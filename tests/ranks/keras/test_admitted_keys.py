"""Dynamic tables of eager code give keys rows by how often they came, as a dictionary in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

import collective
from collective import TablePolicy
from collective import keras as collective_keras
from tests.ranks import admitted_keys
from tests.ranks.admitted_keys import KEYS, RATE, Truth, batches
from tests.ranks.dynamic_tables import D, normal
from tests.ranks.keras.models import keras

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

COUNT = TablePolicy(filter_freq=3, default_value_no_permission=-0.5)
BLOOM = TablePolicy(filter_freq=3, max_element_size=30, false_positive_probability=0.3)


class Model(keras.Model):
    """Looks up the first half of its ids for one sample each, which backend sok pools."""

    def __init__(self, policy):
        super().__init__()
        tf2.random.set_seed(7)
        self.table = collective.get_embedding_variable(
            "t", D, initializer=normal(), ev_option=policy
        )
        tf2.function(lambda: self(KEYS[:2]))()

    def call(self, ids):
        ids = tf2.reshape(ids, [-1])
        half = tf2.size(ids, tf2.int64) // 2
        places = tf2.stack([tf2.range(half), tf2.zeros([half], tf2.int64)], 1)
        sparse = tf2.SparseTensor(places, ids[:half], tf2.stack([half, 1]))
        pooled = tf2.nn.embedding_lookup_sparse(self.table, sparse, None, combiner="sum")
        return tf2.concat([pooled, tf2.nn.embedding_lookup(self.table, ids[half:])], 0)


def compiled(policy, size, **options):
    """Returns a model with a loss whose gradient, the mean over ranks, is that of `Truth`."""
    keras.backend.clear_session()
    model = Model(policy)
    loss = lambda _, rows: size * tf2.reduce_sum((rows - 1) ** 2)  # noqa: E731
    model.compile(keras.optimizers.legacy.SGD(RATE), loss, **options)  # It has no slots.
    return model


def own(keys, rank, size, more=0):
    """Returns batches of this rank's keys, the last of them for `more` steps again."""
    keys = [batch[rank::size] for batch in [*keys, *keys[-1:] * more]]
    return tf2.data.Dataset.from_tensor_slices((keys, keys)).map(lambda x, y: (x[:, None], y))


def compare(model, truth):
    """Compares what keys read outside of training, the rows, and how often their keys came."""
    rows = tf2.function(lambda: tf2.nn.embedding_lookup(model.table, KEYS))()
    np.testing.assert_allclose(rows, truth.read(KEYS), rtol=1e-5, atol=1e-6)
    mine, found = KEYS[model.table._is_owned(KEYS)], {}
    for keys, _, came in model.table.export(frequencies=True):
        found.update(zip(keys.tolist(), came.tolist()))
    assert found == {int(k): truth.frequencies[int(k)] for k in mine if int(k) in truth.rows}


def update_of(model, other, optimizer, take):
    """Returns a step of one's own, on the model's table and that of another layer.

    They share an exchange, which an invalid id of the other layer refuses.
    """
    variables = [*model.trainable_variables, other.embeddings]

    def gradients(ids, number):
        with tf2.GradientTape() as tape:
            loss = model.loss(None, model(ids)) + tf2.reduce_sum(other(number))
        return tape.gradient(loss, variables)

    taken = take(gradients)

    def work(ids, number):
        optimizer.apply_gradients(zip(taken(ids, number), variables))

    return work


def train_by(step, optimizer_of=lambda model: model.optimizer, take=lambda gradients: gradients):
    """Returns a loop over the batches, with calls of `step` that are refused and that are not.

    Args:
        step: makes what is called of a step.
        optimizer_of: makes the optimizer.
        take: makes of what takes gradients what the step calls for it.
    """

    def train(model, rank, size, keys):
        other = keras.layers.Embedding(4, 2, name="other")
        other.build([])
        call = step(update_of(model, other, optimizer_of(model), take))
        for ids, _ in own(keys, rank, size):
            with pytest.raises(tf2.errors.InvalidArgumentError):
                call(ids, tf2.constant([9 if rank == size - 1 else 1]))
            call(ids, tf2.constant([1]))

    return train


def train_by_fit(model, rank, size, keys):
    """Rank 0 has another batch, which nobody trains."""
    more = 1 if rank == 0 and size > 1 else 0
    model.fit(own(keys, rank, size, more), verbose=0)
    model.evaluate(own(keys[:1], rank, size), verbose=0)
    model.predict(own(keys[:1], rank, size), verbose=0)


def new_optimizer(_):
    return keras.optimizers.SGD(RATE)


WAYS = {
    "fit": (train_by_fit, BLOOM, {}),
    "several steps": (train_by_fit, COUNT, {"steps_per_execution": 2}),
    "eagerly": (train_by_fit, BLOOM, {"run_eagerly": True}),
    "function": (train_by(tf2.function, new_optimizer), COUNT, {}),
    "tape": (train_by(lambda work: work, new_optimizer), COUNT, {}),
    "returned": (train_by(lambda work: work, new_optimizer, tf2.function), COUNT, {}),
}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_numpy(strategy, rank, size, way, crowded):
    """Every occurrence in training counts, on every rank; nothing else does."""
    train, policy, options = WAYS[way]
    truth, all_keys = Truth(policy), batches(6)
    with strategy.scope(), strategy.embedding_scope():
        model = compiled(policy, size, **options)
        for keys in (all_keys[:2], all_keys[2:]):
            train(model, rank, size, keys)
            for batch in keys:
                truth.train(batch)
            for _ in range(3):
                tf2.nn.embedding_lookup(model.table, KEYS)
            compare(model, truth)
    assert 0 < len(truth.rows) < len(KEYS)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", [COUNT, BLOOM], ids=["count", "bloom"])
def test_a_session_goes_on_and_fit_with_its_counts(strategy, rank, size, folder, policy, crowded):
    """A model that has counted other keys has the checkpoint's counts afterwards."""
    truth, all_keys = Truth(policy), batches(6)
    with strategy.scope(plan="quiet"):
        saved = collective_keras.callbacks.Checkpoint(folder)
        model = compiled(policy, size)
        model.fit(own(all_keys[:2], rank, size), verbose=0, callbacks=[saved])
        tf = tf2.compat.v1
        with tf.Graph().as_default():
            graph_model = admitted_keys.Model(strategy, policy)
            with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
                graph_model.steps(session, *all_keys[2:4])
        last = compiled(policy, size)
        last.fit(own([KEYS[-24:]], rank, size), verbose=0)
        assert saved.restore(last) == 4
        last.fit(own(all_keys[4:], rank, size), verbose=0)
        for batch in all_keys:
            truth.train(batch)
        compare(last, truth)


@pytest.mark.slow
def test_a_saved_model_has_admitted_rows_alone(strategy, rank, size, folder):
    """Other keys read in plain TensorFlow what they read in the model."""
    keys = np.array([5, 5, 5, 5, 5, 5, 7, 9, 9, 9, 11, 13])
    with strategy.scope(), strategy.embedding_scope(policy=COUNT):
        ids = keras.Input([], dtype=tf2.int64, name="items")
        model = keras.Model(ids, collective_keras.layers.Embedding(4, name="open")(ids))
        model.compile("sgd", "mse")
        data = tf2.data.Dataset.from_tensors((keys[rank::size], keys[rank::size]))
        model.fit(data, verbose=0)
        asked = tf2.constant([5, 7, 9, 11, 1000], tf2.int64)
        want = tf2.function(lambda: model(asked))().numpy()
        assert (want[[1, 3, 4]] == -0.5).all() and (want[[0, 2]] != -0.5).all()
        path = strategy.export_saved_model(folder, model=model)
    served = tf2.saved_model.load(path).signatures["serving_default"]
    (answer,) = served(items=asked).values()
    np.testing.assert_allclose(answer, want, rtol=0, atol=1e-6)


def test_what_eager_lookups_cannot_count_is_refused(strategy):
    """A second gradient would count keys twice; what no tape watches, not at all."""
    with strategy.scope():
        table = collective.get_embedding_variable("t", D, ev_option=COUNT)
        with tf2.GradientTape(persistent=True) as tape:
            rows = tf2.nn.embedding_lookup(table, KEYS[:3])
            first, second = tf2.reduce_sum(rows), tf2.reduce_sum(rows**2)
        tape.gradient(first, table)
        with pytest.raises(NotImplementedError, match="second gradient of a lookup in table 't'"):
            tape.gradient(second, table)
        fixed = collective.get_embedding_variable("f", D, ev_option=COUNT, trainable=False)
        with (
            tf2.GradientTape(),
            pytest.raises(NotImplementedError, match="'f' is looked up eagerly, and counts its"),
        ):
            tf2.nn.embedding_lookup(fixed, KEYS[:3])
