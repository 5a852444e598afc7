"""Means over what counts of a rank's own batch are warned of: ranks divide by other numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.wrappers import masked_means
from tests.ranks.keras.models import keras

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
