"""Python functions and prints of what a lookup gave, inside a function that ranks call together."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

from tests.ranks.keras.models import BATCH, compare, data, dataset, keras, loss_of, make_model, part

pytestmark = pytest.mark.either_backend


def shown_by_print(rows, seen):
    tf2.print(rows, output_stream=f"file://{seen}")
    return rows


def seen_by_python(rows, seen):
    def note(values):
        with open(seen, "a", encoding="utf-8") as file:
            file.write(f"{values.shape}\n")
        return values

    return tf2.ensure_shape(tf2.numpy_function(note, [rows], rows.dtype), rows.shape)


class Showing(keras.Model):
    """Has a model's rows pass through what has a side effect, before its own lookups are over."""

    def __init__(self, model, show, seen):
        super().__init__()
        self.model, self.show, self.seen = model, show, seen
        self.first = keras.layers.Embedding(50, 1, "zeros", trainable=False)

    def call(self, inputs):
        shown = self.show(self.first(inputs[0]), self.seen)
        return self.model(inputs) + tf2.stop_gradient(tf2.zeros_like(shown))


@pytest.mark.parametrize("show", [shown_by_print, seen_by_python])
def test_rows_are_shown_before_another_lookup(strategy, rank, size, tmp_path, show):
    arrays = data(5 * BATCH)
    plain = make_model()
    plain.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    plain.fit(dataset(arrays, BATCH), verbose=0)
    with strategy.scope():
        with strategy.embedding_scope():
            model = Showing(make_model(), show, tmp_path / "seen")
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
        model.fit(dataset(part(arrays, rank, size), BATCH // size), verbose=0)
    assert len((tmp_path / "seen").read_text().splitlines()) >= 5
    compare(model.model, plain, rank, size)


@pytest.mark.ranks(2, 3)
def test_a_call_inside_a_call_is_refused(strategy, rank, size):
    (users, words), labels = part(data(BATCH), rank, size)
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        inner = tf2.function(lambda: loss_of(model, users, words, labels))
        inner()

        @tf2.function
        def outer():
            other = tf2.numpy_function(lambda: inner().numpy(), [], tf2.float32)
            return loss_of(model, users, words, labels) + other

        if size == 1:
            outer()
            return
        with pytest.raises(Exception, match="in a tf.py_function or a thread of TensorFlow's own"):
            outer()
        assert np.isfinite(inner().numpy())
