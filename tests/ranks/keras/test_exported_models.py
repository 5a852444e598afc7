"""Exported Keras models answer as plain Keras that trained alike, however layers are nested."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf2

import collective
from tests.ranks.keras.models import (
    BATCH,
    USER_ROWS,
    USERS,
    WORD_ROWS,
    WORDS,
    data,
    dataset,
    keras,
    part,
)

pytestmark = [pytest.mark.slow, pytest.mark.double, pytest.mark.either_backend]

NAMES = ("user_table", "word_vector")
constant = keras.initializers.Constant


def dense(name, units=4, seed=0):
    start = keras.initializers.GlorotUniform(seed)
    return keras.layers.Dense(units, kernel_initializer=start, name=name)


def tower(name, rows, make=keras.Sequential):
    table = keras.layers.Embedding(*rows.shape, constant(rows), name=f"{name}_table")
    return make([table, dense(f"{name}_vector")], name=name)


def sequential(known):
    """Towers that learn their inputs when they are called, or know them before."""
    towers = []
    for name, rows in (("user", USER_ROWS), ("word", WORD_ROWS)):
        towers.append(tower(name, rows))
        if known:
            towers[-1].build([None])
    return joined(*towers)


def functional():
    """A tower in a tower, and a layer in both."""
    shared = dense("shared")

    def make(layers, name):
        ids = keras.Input([], dtype=tf2.int64, name=f"{name}_ids")
        vectors = ids
        for layer in layers:
            vectors = layer(vectors)
        return keras.Model(ids, shared(vectors), name=name)

    user, word = tower("user", USER_ROWS, make), tower("word", WORD_ROWS, make)
    ids = keras.Input([], dtype=tf2.int64)
    return joined(keras.Model(ids, dense("outer", seed=1)(user(ids)), name="outermost"), word)


class Tower(keras.layers.Layer):
    """Has layers of its own."""

    def __init__(self, rows, dim, **kwargs):
        super().__init__(**kwargs)
        start = constant({USERS: USER_ROWS, WORDS: WORD_ROWS}[rows])
        self.table = keras.layers.Embedding(rows, dim, start, name="table")
        self.vector = dense("vector")

    def call(self, ids):
        return self.vector(self.table(ids))

    def get_config(self):
        table = self.table
        return {**super().get_config(), "rows": table.input_dim, "dim": table.output_dim}


class LateTower(keras.layers.Layer):
    """Makes its layers when it is built."""

    def build(self, input_shape):
        rows = {"user": USER_ROWS, "word": WORD_ROWS}[self.name]
        self.table = keras.layers.Embedding(*rows.shape, constant(rows), name="table")
        self.vector = dense("vector")
        super().build(input_shape)

    def call(self, ids):
        return self.vector(self.table(ids))


def joined(user_tower, word_tower):
    """Inputs have names of layers in the towers, which a graph couldn't give twice."""
    user, word = (keras.Input([], dtype=tf2.int64, name=name) for name in NAMES)
    vectors = [user_tower(user), word_tower(word)]
    return keras.Model([user, word], dense("score", 1)(keras.layers.Multiply()(vectors)))


def alone():
    """A sequential model of a sequential model."""
    ids = keras.Input([], dtype=tf2.int64, name="users")
    return keras.Sequential([ids, tower("user", USER_ROWS), dense("score", 1)])


KINDS = {
    "sequential": lambda: sequential(known=False),
    "sequential, built": lambda: sequential(known=True),
    "functional": functional,
    "layers": lambda: joined(Tower(USERS, 8, name="user"), Tower(WORDS, 4, name="word")),
    "late layers": lambda: joined(LateTower(name="user"), LateTower(name="word")),
    "alone": alone,
}


def inputs(model, users, words):
    return (users, words[:, 0]) if len(getattr(model, "inputs", None) or []) == 2 else users


def trained(make, rank, size, scope=contextlib.nullcontext):
    keras.backend.clear_session()
    with scope():
        model = make()
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    (users, words), labels = data(5 * BATCH)
    own = part((inputs(model, users, words), labels), rank, size)
    model.fit(dataset(own, BATCH // size), verbose=0)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_a_model(strategy, rank, size, folder, kind):
    (users, words), _ = data(BATCH)
    plain = trained(KINDS[kind], 0, 1)
    with strategy.scope():
        model = trained(KINDS[kind], rank, size, strategy.embedding_scope)
        path = strategy.export_saved_model(folder, model=model)
    served = tf2.saved_model.load(path).signatures["serving_default"]
    given = inputs(plain, users, words)
    named = dict(zip(model.input_names, given if isinstance(given, tuple) else [given]))
    (answer,) = served(**{name: tf2.constant(ids) for name, ids in named.items()}).values()
    np.testing.assert_allclose(answer, plain(given), rtol=0, atol=1e-6)


@pytest.mark.parametrize("first_call", ["by a model", "in a function"])
def test_open_keys_in_a_model(strategy, rank, size, folder, first_call):
    """Of a layer of this library, in a model that learns its inputs when it is called."""
    (users, _), labels = data(BATCH)
    with strategy.scope():
        keys = collective.keras.layers.Embedding(
            8, embeddings_initializer=constant(USER_ROWS[0]), name="keys"
        )
        inner = keras.Sequential([keys, dense("vector")], name="inner")
        if first_call == "in a function":
            tf2.function(inner)(users[: BATCH // size])
        ids = keras.Input([], dtype=tf2.int64, name="ids")
        model = keras.Model(ids, dense("score", 1)(inner(ids)))
        names = [variable.name for variable in model.variables]
        assert names[:2] == ["keys/embeddings:0", "vector/kernel:0"]
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        model.fit(dataset(part((users, labels), rank, size), BATCH // size), verbose=0)
        want = tf2.function(lambda: model(users))()
        path = strategy.export_saved_model(folder, model=model)
    served = tf2.saved_model.load(path).signatures["serving_default"]
    (answer,) = served(ids=tf2.constant(users)).values()
    np.testing.assert_allclose(answer, want, rtol=0, atol=1e-6)
