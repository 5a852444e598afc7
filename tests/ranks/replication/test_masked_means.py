"""Means over what counts of a rank's own batch are warned of: ranks divide by other numbers."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.communication.horovod_library import hvd
from collective.wrappers import masked_means
from tests.ranks.keras.models import BATCH, compare, keras, part

pytestmark = [pytest.mark.either_backend, pytest.mark.double]

IDS = np.array([[1, 2, 0], [3, 0, 0]])


@pytest.fixture
def said(monkeypatch):
    texts = []
    monkeypatch.setattr(tf.logging, "warning", lambda text, *_: texts.append(text))
    masked_means._warn.cache_clear()
    yield texts
    masked_means._warn.cache_clear()


def about(said, words):
    return [text for text in said if "divides by its own number" in text and words in text]


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("reduction", ["auto", "sum"])
def test_a_keras_loss_with_a_mask(strategy, rank, size, said, is_masked, reduction):
    with strategy.scope():
        with strategy.embedding_scope():
            rows = keras.layers.Embedding(5, 2, mask_zero=is_masked)
        model = keras.Sequential([rows, keras.layers.Dense(1)])
        model.compile("sgd", keras.losses.MeanSquaredError(reduction))
        for _ in range(2):
            model.train_on_batch(IDS, np.ones([2, 3, 1]))
    is_said = is_masked and reduction == "auto" and size > 1 and rank == 0
    assert len(about(said, "mask_zero=True")) == is_said, said


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ({}, False),
        ({"weights": 0.5}, False),
        ({"weights": "fed"}, True),
        ({"weights": "fed", "reduction": tf.losses.Reduction.MEAN}, True),
        ({"weights": "fed", "reduction": tf.losses.Reduction.SUM_OVER_BATCH_SIZE}, False),
    ],
    ids=["none", "number", "nonzero", "mean", "batch"],
)
def test_a_loss_with_weights(strategy, rank, size, said, options, is_said):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            tf.get_variable("t", [4, 2])
        x = tf.placeholder(tf.float32, [None])
        if options.get("weights") == "fed":
            options = {**options, "weights": tf.placeholder(tf.float32, [None])}
        made = len(tf.get_default_graph().get_operations())
        for _ in range(2):
            tf.losses.absolute_difference(x, 2 * x, **options)
            tf.losses.compute_weighted_loss(x, **options)
        inside = len(tf.get_default_graph().get_operations()) - made
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        if "weights" in options and not isinstance(options["weights"], float):
            options["weights"] = tf.placeholder(tf.float32, [None])
        made = len(tf.get_default_graph().get_operations())
        for _ in range(2):
            tf.losses.absolute_difference(x, 2 * x, **options)
            tf.losses.compute_weighted_loss(x, **options)
        # Random operations without a seed are numbered by those before them.
        assert len(tf.get_default_graph().get_operations()) - made == inside
    assert len(about(said, "tf.losses")) == (is_said and size > 1 and rank == 0), said


def test_a_sum_over_what_a_mask_leaves_is_that_of_all_ranks(strategy, rank, size):
    """As the warning advises; ranks have different numbers of positions."""
    ids = np.concatenate([(np.arange(BATCH)[:, None] > [4, 9, 14]) * 3, np.ones([BATCH, 3])])
    labels = np.arange(6.0 * BATCH, dtype=np.float32).reshape(-1, 3, 1) / 100

    def trained(embedding_scope, arrays, batch):
        start = keras.initializers.Constant(np.arange(10).reshape(5, 2) / 10)
        with embedding_scope():
            rows = keras.layers.Embedding(5, 2, start, mask_zero=True)
        model = keras.Sequential([rows, keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", keras.losses.MeanSquaredError("sum"))
        model.optimizer.learning_rate = 1e-3
        model.fit(*arrays, batch_size=batch, shuffle=False, epochs=2, verbose=0)
        return model

    plain = trained(contextlib.nullcontext, (ids, labels), BATCH)
    with strategy.scope():
        own = part((ids, labels), rank, size)
        compare(trained(strategy.embedding_scope, own, BATCH // size), plain, rank, size)


def test_a_sum_divided_by_the_mean_of_numbers_is_that_of_one_process(strategy, rank, size):
    values = np.arange(12, dtype=np.float32)
    counts = (values > 4).astype(np.float32)

    def gradient(x, weights, of_all_ranks):
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        total = tf.reduce_sum(tf.square(w * x - 3) * weights)
        (found,) = tf.gradients(total / of_all_ranks(tf.reduce_sum(weights)), [w])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return session.run(found)

    with tf.Graph().as_default():
        want = gradient(values, counts, lambda number: number)
    own = slice(12 * rank // size, 12 * (rank + 1) // size)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        mean = hvd.allreduce if size > 1 else lambda number: number
        got = gradient(values[own], counts[own], mean)
    np.testing.assert_allclose(got, want, rtol=1e-6)
