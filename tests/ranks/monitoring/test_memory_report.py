"""An error for lack of memory says what the tables take."""

from __future__ import annotations

import pytest
import tensorflow.compat.v1 as tf

from collective.ops import kernel_device

pytestmark = pytest.mark.either_backend


@pytest.mark.parametrize(
    "chosen, words",
    [("cpu", "what their rows take. Train on more ranks"), ("gpu", "95 % of the GPU's")],
)
def test_tables_are_named_with_what_they_take(strategy, size, monkeypatch, chosen, words):
    def full(x):
        raise MemoryError("no room")

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            for name, rows in (("small", 9 * size), ("large", 100 * size)):
                table = tf.get_variable(name, [rows, 16], initializer=tf.zeros_initializer())
        tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(tf.nn.embedding_lookup(table, [1])))
        needs_more = tf.py_function(full, [tf.zeros([])], tf.float32)
        monkeypatch.setattr(kernel_device, "chosen", lambda: chosen)
        with (
            tf.Session() as session,
            pytest.raises(tf.errors.ResourceExhaustedError, match="no room") as caught,
        ):
            session.run(needs_more)
    taken = (
        f"take {64 * 209:,} bytes on this rank: "
        "'large/Adagrad' 6,400, 'large' 6,400, 'small' 576; dynamic ones"
    )
    assert taken in caught.value.message and words in caught.value.message
