"""Checks of all numbers of a graph execute no error that a table is outside of scope()."""

from __future__ import annotations

import types

import pytest
import tensorflow.compat.v1 as tf

from collective.tables import dense_view

TABLE = types.SimpleNamespace(
    rows=3, dim=2, dtype=tf.float32, op=types.SimpleNamespace(name="scope/t")
)


def test_a_tables_error_is_none_of_the_numbers():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        dense_view.unread(TABLE)
        tf.truediv(1.0, tf.placeholder(tf.float32, [], "x"), "truediv")
        checks = dense_view.check_numerics(tf.add_check_numerics_ops)
        session.run(checks, {"x:0": 2.0})
        with pytest.raises(tf.errors.InvalidArgumentError, match="truediv:0 : Tensor had Inf"):
            session.run(checks, {"x:0": 0.0})
        # The list of operations is the graph's own again.
        assert any(dense_view.UNREAD in op.name for op in graph.get_operations())
