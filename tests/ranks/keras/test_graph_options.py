"""What functions and eager code would ignore without a word is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

from tests.ranks.keras.models import keras

pytestmark = pytest.mark.double

new = keras.optimizers


def test_steps_of_several_batches_are_for_graphs(strategy):
    """A function would update with each batch, without a word."""
    weight = tf2.Variable(2.0)
    with strategy.scope(local_steps=2):

        @tf2.function
        def train():
            with tf2.GradientTape() as tape:
                loss = weight**2
            new.SGD(0.1).apply_gradients([(tape.gradient(loss, weight), weight)])

        with pytest.raises(NotImplementedError, match=r"local_steps=2\) is for graphs, but"):
            train()
    assert float(weight) == 2


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_is_for_graphs(strategy, precision):
    """A function would compute in float32 without a word."""
    weight = tf2.Variable(2.0)
    with strategy.scope(mixed_precision=precision):
        with strategy.embedding_scope():
            layer = keras.layers.Embedding(20, 3, embeddings_initializer="ones")
            layer.build([None])

        @tf2.function
        def train():
            with tf2.GradientTape() as tape:
                loss = weight**2
            new.SGD(0.1).apply_gradients([(tape.gradient(loss, weight), weight)])

        for call in (
            lambda: layer(tf2.constant([1])),
            tf2.function(lambda: layer(tf2.constant([1]))),
            train,
        ):
            with pytest.raises(NotImplementedError, match=f"'{precision}'.* is for graphs, but"):
                call()
    assert float(weight) == 2


def test_tangents_of_tables_are_refused(strategy):
    """Lookups would drop them without a word."""
    with strategy.scope():
        with strategy.embedding_scope():
            layer = keras.layers.Embedding(4, 2)
            layer.build([])
        table = layer.embeddings
        with pytest.raises(NotImplementedError, match=f"the table '{table.op.name}'"):
            tf2.autodiff.ForwardAccumulator(table, tf2.ones([4, 2]))
        rows = layer(tf2.constant([1, 3]))
        with tf2.autodiff.ForwardAccumulator(rows, tf2.ones([2, 2])) as tangents:
            doubled = 2 * rows
        np.testing.assert_array_equal(tangents.jvp(doubled), np.full([2, 2], 2))
