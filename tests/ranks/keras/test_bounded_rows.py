"""Keras's updates in eager code keep the rows of a gradient within a table's weight_bound."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

import collective
from collective import TablePolicy
from collective import keras as collective_keras
from tests.ranks import reference
from tests.ranks.keras.models import keras
from tests.ranks.keras.test_open_keys import FROM_THE_FIRST_STEP
from tests.ranks.keras.test_open_keys import OPTIMIZERS as ALL_OPTIMIZERS
from tests.ranks.tables.test_weight_bound import BOUND, FIRST, KEYS, KINDS, B, D, V, batches

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

new, legacy = keras.optimizers, keras.optimizers.legacy
OPTIMIZERS = {
    # These move rows before their first gradient, which rows of a dynamic table don't.
    **{name: make for name, make in ALL_OPTIMIZERS.items() if name not in FROM_THE_FIRST_STEP},
    "SGD": lambda: new.SGD(0.5, momentum=0.5),
    "SGD without momentum": lambda: new.SGD(0.5),
    "Adagrad": lambda: new.Adagrad(0.2),
    "Adam": lambda: new.Adam(0.1),
    "legacy Adam": lambda: legacy.Adam(0.1),
    "scaled": lambda: keras.mixed_precision.LossScaleOptimizer(new.Adam(0.1), False, 4.0),
    "legacy scaled": lambda: keras.mixed_precision.LossScaleOptimizer(legacy.Adam(0.1), False, 4.0),
}
ACTING = ("SGD", "SGD without momentum", "Adagrad", "Adam", "legacy Adam", "scaled")


def loss_of(rows, targets):
    return tf2.reduce_mean(tf2.reduce_sum((rows - targets[:, None]) ** 2, [1, 2])) / 2


class Plain:
    """Trains a matrix by plain Keras, and clips the rows of each gradient in NumPy."""

    def __init__(self, make, bound=BOUND):
        self.optimizer, self.bound, self.acted = make(), bound, False
        self.table = tf2.Variable(np.tile(FIRST, (V, 1)))

    def step(self, ids, targets):
        with tf2.GradientTape() as tape:
            loss = loss_of(tf2.gather(self.table, ids), targets.astype(np.float32))
        gradient = tape.gradient(loss, self.table)
        self.optimizer.apply_gradients([(gradient, self.table)])
        rows, values = np.unique(ids), self.table.numpy()
        bound = float(np.float32(self.bound))
        bound = bound if bound <= self.bound else float(np.nextafter(np.float32(bound), 0))
        self.acted |= (np.abs(values[rows]) > bound).any()
        values[rows] = np.clip(values[rows], -bound, bound)
        self.table.assign(values)


class Model(keras.Model):
    """Has both kinds of tables, of the same rows."""

    def __init__(self, strategy, bound):
        super().__init__()
        start = keras.initializers.Constant
        with strategy.embedding_scope(policy=TablePolicy(weight_bound=bound)):
            self.fixed = keras.layers.Embedding(V, D, start(np.tile(FIRST, (V, 1))))
            self.fixed.build([None])
            self.open = collective_keras.layers.Embedding(D, embeddings_initializer=start(FIRST))
            self.open.build()

    def call(self, ids):
        keys = tf2.gather(tf2.constant(KEYS), ids)
        return tf2.stack([self.fixed(ids), self.open(keys)])

    def rows(self):
        """Returns all rows, as `call` does."""
        return tf2.function(lambda: self(tf2.range(V, dtype=tf2.int64)))().numpy()


def both_losses(targets, rows):
    return loss_of(rows[0], targets) + loss_of(rows[1], targets)


def by_tape(model, optimizer, function):
    def step(ids, targets):
        with tf2.GradientTape() as tape:
            loss = both_losses(targets, model(ids))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    return function(step)


def own(batch, rank, size):
    ids, targets = (reference.part(array, rank, size) for array in batch)
    return tf2.constant(ids), tf2.constant(targets, tf2.float32)


def equals(strategy, rank, size, name, function=tf2.function):
    plain, seen = Plain(OPTIMIZERS[name]), np.zeros(V, bool)
    with strategy.scope():
        model, optimizer = Model(strategy, BOUND), OPTIMIZERS[name]()
        step = by_tape(model, optimizer, function)
        for batch in batches():
            plain.step(*batch)
            seen[np.unique(batch[0])] = True
            step(*own(batch, rank, size))
            got = dict(zip(KINDS, model.rows()))
            want = plain.table.numpy()
            np.testing.assert_allclose(got["static"], want, rtol=0, atol=2e-6)
            np.testing.assert_allclose(got["dynamic"][seen], want[seen], rtol=0, atol=2e-6)
            assert np.abs(got["static"][np.unique(batch[0])].astype(np.float64)).max() <= BOUND
    assert plain.acted or name not in ACTING, "the bound never acts: the case shows nothing"


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    [n if n in ACTING else pytest.param(n, marks=pytest.mark.matrix) for n in OPTIMIZERS],
)
def test_rows_are_plain_keras_with_clipped_rows(strategy, rank, size, name):
    """Of static and dynamic tables, in one update, by new and by legacy optimizers."""
    equals(strategy, rank, size, name)


@pytest.mark.slow
@pytest.mark.double
@pytest.mark.parametrize("name", ["Adagrad", "legacy Adam"])
def test_so_they_are_without_a_function(strategy, rank, size, name):
    equals(strategy, rank, size, name, lambda step: step)


@pytest.mark.slow
@pytest.mark.double
def test_fit_keeps_to_it_and_averages_clipped_rows(strategy, rank, size):
    """use_ema averages the rows of a static table as the bound leaves them."""
    averaging = {"use_ema": True, "ema_momentum": 0.5}
    want, average = Plain(lambda: new.SGD(0.5), 0.25), np.tile(FIRST, (V, 1)).astype(np.float64)
    with strategy.scope(), strategy.embedding_scope(policy=TablePolicy(weight_bound=0.25)):
        layer = keras.layers.Embedding(V, D, keras.initializers.Constant(np.tile(FIRST, (V, 1))))
        model = keras.Sequential([layer])
        model.build([None, 2])
        model.compile(new.SGD(0.5, **averaging), lambda y, rows: loss_of(rows, y))
        for batch in batches():
            want.step(*batch)
            average += 0.5 * (want.table.numpy() - average)
            model.fit(tf2.data.Dataset.from_tensors(own(batch, rank, size)), verbose=0)
            rows = tf2.function(lambda: layer(tf2.range(V)))()
            # Keras puts the averages into the model when `fit` ends.
            np.testing.assert_allclose(rows, average, rtol=0, atol=2e-6)
            want.table.assign(average)
    assert want.acted


@pytest.mark.slow
@pytest.mark.double
def test_a_constraint_comes_before_it(strategy, rank, size):
    """Which is of all rows; those of the gradient are within the bound afterwards."""
    ids, want = np.tile([1, 4], (B, 1)), np.tile(3 * FIRST.astype(np.float64), (V, 1))
    want[[1, 4]] = np.clip(want[[1, 4]] + 3 * 0.01, -BOUND, BOUND)
    with strategy.scope(), strategy.embedding_scope(policy=TablePolicy(weight_bound=BOUND)):
        start = keras.initializers.Constant(np.tile(FIRST, (V, 1)))
        layer = keras.layers.Embedding(V, D, start, embeddings_constraint=lambda w: w * 3)
        layer.build([None])
        optimizer = new.SGD(0.01)

        @tf2.function
        def step(ids):
            with tf2.GradientTape() as tape:
                loss = -tf2.reduce_sum(layer(ids)) * (size / B)
            optimizer.apply_gradients([(tape.gradient(loss, layer.embeddings), layer.embeddings)])

        step(own((ids, ids), rank, size)[0])
        rows = tf2.function(lambda: layer(tf2.range(V)))()
        np.testing.assert_allclose(rows, want, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.double
@pytest.mark.parametrize("name", ["Adagrad", "legacy SGD"])
def test_a_bound_that_never_acts_changes_no_bit(strategy, rank, size, name):
    found = []
    for bound in (None, 100.0):
        with strategy.scope():
            keras.backend.clear_session()
            tf2.random.set_seed(7)
            model, optimizer = Model(strategy, bound), OPTIMIZERS[name]()
            step = by_tape(model, optimizer, tf2.function)
            for batch in batches(3):
                step(*own(batch, rank, size))
            found.append(model.rows().tobytes())
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.double
def test_a_refused_call_clips_nothing(strategy, rank, size):
    """Rows that were imported beyond the bound stay so until an update touches them."""

    with strategy.scope():
        table = collective.get_embedding_variable("t", D, ev_option=TablePolicy(weight_bound=BOUND))
        other = keras.layers.Embedding(4, D, name="other")
        with strategy.embedding_scope():
            other.build([])
        table.import_(None, KEYS, np.full((V, D), 5.0, np.float32))
        optimizer = new.SGD(1e-3)

        @tf2.function
        def step(ids, number):
            with tf2.GradientTape() as tape:
                rows = tf2.nn.embedding_lookup(table, tf2.gather(tf2.constant(KEYS), ids))
                loss = tf2.reduce_sum(rows) + tf2.reduce_sum(other(number))
            variables = [table, other.embeddings]
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

        def rows():
            return tf2.function(lambda: tf2.nn.embedding_lookup(table, KEYS))().numpy()

        ids = tf2.constant([0, 1])
        with pytest.raises(tf2.errors.InvalidArgumentError):
            step(ids, tf2.constant([9 if rank == size - 1 else 1]))
        np.testing.assert_array_equal(rows(), 5)
        step(ids, tf2.constant([1]))
        np.testing.assert_allclose(rows()[:2], BOUND, rtol=1e-6)
        np.testing.assert_array_equal(rows()[2:], 5)
