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


def towers(embedding_scope):
    """Returns a model of users and one of words, each with a table."""
    constant, layers = keras.initializers.Constant, keras.layers
    with embedding_scope():
        users = layers.Embedding(USERS, 8, constant(USER_ROWS), name="users")
        words = layers.Embedding(len(WORDS) + 1, 8, constant(WORD_ROWS), name="words")
    lookup = layers.StringLookup(vocabulary=WORDS, mask_token=None)
    return (
        keras.Sequential([users, _dense(8, 1)]),
        keras.Sequential([lookup, words, _dense(8, 2)]),
    )


class Towers(tfrs.Model):
    """Rates a word for a user."""

    def __init__(self, embedding_scope):
        super().__init__()
        self.user, self.word = towers(embedding_scope)
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


class Retrieving(tfrs.Model):
    """Finds a word for a user, among those of the batch."""

    def __init__(self, embedding_scope, loss, **options):
        super().__init__()
        self.user, self.word = towers(embedding_scope)
        top = keras.metrics.TopKCategoricalAccuracy(3, name="top_3")
        self.is_corrected = options.pop("is_corrected", False)
        self.has_ids = "remove_accidental_hits" in options
        self.task = tfrs.tasks.Retrieval(
            loss,
            batch_metrics=[top],
            loss_metrics=[keras.metrics.Mean("loss_of_task")],
            **options,
        )

    def compute_loss(self, features, training=False):
        users, words = self.user(features["user"]), self.word(features["word"])
        options = {"candidate_ids": features["word"]} if self.has_ids else {}
        if self.is_corrected:
            options["candidate_sampling_probability"] = (1 + features["rating"]) / 4
        return self.task(users, words, **options)


def softmax(reduction):
    return keras.losses.CategoricalCrossentropy(from_logits=True, reduction=reduction)


@pytest.mark.parametrize(
    ("loss", "options", "is_eager"),
    [
        (None, {}, False),
        (None, {"temperature": 0.5, "is_corrected": True}, False),
        (None, {"remove_accidental_hits": True}, False),
        (None, {"num_hard_negatives": 5}, False),
        (softmax("sum_over_batch_size"), {}, False),
        (None, {"remove_accidental_hits": True}, True),
    ],
    ids=["plain", "corrected", "no_hits", "hard", "mean", "eager"],
)
def test_a_word_is_found_among_those_of_all_ranks(strategy, rank, size, loss, options, is_eager):
    """The negatives of a batch, and its sum, are those of plain Keras's batch."""

    def trained(embedding_scope, rank, size):
        model = Retrieving(embedding_scope, loss, **options)
        model.compile(keras.optimizers.SGD(0.02), run_eagerly=is_eager)
        records = ratings(rank, size)
        records = records.take(4) if is_eager else records
        history = model.fit(records, epochs=2, verbose=0).history
        scores = model.evaluate(records, verbose=0, return_dict=True)
        return model, history, scores

    plain, *want = trained(contextlib.nullcontext, 0, 1)
    with strategy.scope():
        model, *got = trained(strategy.embedding_scope, rank, size)
        compare(model, plain, rank, size)
    for name in ("top_3", "loss_of_task"):
        for here, there in zip(got, want):
            np.testing.assert_allclose(here[name], there[name], rtol=2e-6, err_msg=name)


def test_a_session_trains_with_the_candidates_of_all_ranks(strategy, rank, size):
    tf1 = tf2.compat.v1
    rows = np.random.default_rng(1).normal(size=(2, 12, 3)).astype(np.float32)

    def gradient(rows):
        w = tf1.get_variable("w", [3, 3], initializer=tf1.constant_initializer(np.eye(3)))
        queries, candidates = (tf2.matmul(tf2.constant(x), w) for x in rows)
        loss = tfrs.tasks.Retrieval()(queries, candidates) / 12
        (found,) = tf1.gradients(loss, [w])
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            return session.run(found)

    with tf2.Graph().as_default():
        want = gradient(rows)
    with strategy.scope(plan="quiet"), tf2.Graph().as_default():
        got = gradient(rows[:, 12 * rank // size : 12 * (rank + 1) // size])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_mask_of_candidates_is_refused_on_several_ranks(strategy, size):
    with strategy.scope():
        task, rows = tfrs.tasks.Retrieval(), tf2.ones([2, 3])
        if size == 1:
            task(rows, rows, score_mask=tf2.ones([2, 2], tf2.bool))
            return
        with pytest.raises(NotImplementedError, match="score_mask"):
            task(rows, rows, score_mask=tf2.ones([2, 2], tf2.bool))


def test_a_task_with_a_call_of_its_own_is_warned_of(strategy, rank, size, monkeypatch):
    said = []
    monkeypatch.setattr(tf2.compat.v1.logging, "warning", said.append)

    class Own(tfrs.tasks.Retrieval):
        def call(self, users, words):
            return super().call(users, words, compute_metrics=False)

    with strategy.scope():
        for _ in range(2):
            Own()(tf2.ones([2, 3]), tf2.ones([2, 3]))
    said = [text for text in said if text.startswith("Own.call has other arguments")]
    assert len(said) == (size > 1 and rank == 0)


def test_the_best_of_all_items_needs_an_exported_model(strategy):
    """A dataset of items looks a table up in a function of its own, which no rank can answer."""
    with strategy.scope():
        model = Towers(strategy.embedding_scope)
        items = tf2.data.Dataset.from_tensor_slices(WORDS).batch(8)
        with pytest.raises(NotImplementedError, match="'words/embeddings' is looked up in a func"):
            tfrs.metrics.FactorizedTopK(candidates=items.map(model.word))
