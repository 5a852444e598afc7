"""Models of TensorFlow Recommenders train by `fit` as plain Keras trains them in one process."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow_recommenders as tfrs

from tests.ranks.keras.models import BATCH, USER_ROWS, USERS, compare, data, keras, part

pytestmark = [pytest.mark.slow, pytest.mark.double]

WORDS = [f"word {number}" for number in range(30)]
WORD_ROWS = np.random.default_rng(7).normal(0, 0.5, (len(WORDS) + 1, 8)).astype(np.float32)


class Towers(tfrs.Model):
    """Rates a word for a user."""

    def __init__(self, embedding_scope):
        super().__init__()
        constant, layers = keras.initializers.Constant, keras.layers
        with embedding_scope():
            users = layers.Embedding(USERS, 8, constant(USER_ROWS), name="users")
            words = layers.Embedding(len(WORDS) + 1, 8, constant(WORD_ROWS), name="words")
        lookup = layers.StringLookup(vocabulary=WORDS, mask_token=None)
        self.user = keras.Sequential([users, _dense(8, 1)])
        self.word = keras.Sequential([lookup, words, _dense(8, 2)])
        self.cross = tfrs.layers.dcn.Cross(kernel_initializer=keras.initializers.GlorotUniform(3))
        self.rating = _dense(1, 4)
        self.task = tfrs.tasks.Ranking(
            loss=keras.losses.MeanSquaredError(), metrics=[keras.metrics.RootMeanSquaredError()]
        )

    def compute_loss(self, features, training=False):
        vectors = self.user(features["user"]), self.word(features["word"])
        rating = self.rating(self.cross(tf2.concat(vectors, 1)))
        return self.task(labels=features["rating"], predictions=rating[:, 0])


def _dense(units, seed):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed))


def _unnumbered(name):
    return re.sub(r"_\d+", "", name)


def ratings(rank, size):
    (users, words), rating = data()
    words = np.array(WORDS)[words[:, 0]]
    users, words, rating = part([users, words, rating], rank, size)
    features = {"user": users, "word": words, "rating": rating}
    return tf2.data.Dataset.from_tensor_slices(features).batch(BATCH // size)


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("adam", marks=pytest.mark.matrix)])
def test_ratings_by_two_towers(strategy, rank, size, optimizer):
    def trained(embedding_scope, rank, size):
        model = Towers(embedding_scope)
        model.compile(keras.optimizers.get(optimizer))
        history = model.fit(ratings(rank, size), epochs=2, verbose=0).history
        scores = model.evaluate(ratings(rank, size), verbose=0, return_dict=True)
        return model, history["root_mean_squared_error"], scores["root_mean_squared_error"]

    plain, *want = trained(contextlib.nullcontext, 0, 1)
    with strategy.scope():
        model, *got = trained(strategy.embedding_scope, rank, size)
        compare(model, plain, rank, size)
    # As plain Keras names them where a function is the first to call a model.
    assert [_unnumbered(v.name) for v in model.variables] == [
        _unnumbered(v.name) for v in plain.variables
    ]
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-6)


def test_the_best_of_all_items_needs_an_exported_model(strategy):
    """A dataset of items looks a table up in a function of its own, which no rank can answer."""
    with strategy.scope():
        model = Towers(strategy.embedding_scope)
        items = tf2.data.Dataset.from_tensor_slices(WORDS).batch(8)
        with pytest.raises(NotImplementedError, match="'words/embeddings' is looked up in a func"):
            tfrs.metrics.FactorizedTopK(candidates=items.map(model.word))
