"""Registers the gradients of reads of single rows of dynamic tables."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops.exchange import shard_gradients
from collective.ops.graph import graphs
from collective.ops.rows import dynamic_rows

PLAIN, ADMITTED = "CollectiveDynamicGather", "CollectiveAdmittedGather"


@tf.RegisterGradient(ADMITTED)
def _admitted_gradient(op: tf.Operation, gradient: Any) -> tuple[tf.IndexedSlices, None]:
    """Drops the gradients of keys without rows."""
    slices = _gather_gradient(op, gradient, op.inputs[1].op.inputs[0])[0]
    return slices, None


@tf.RegisterGradient(PLAIN)
def _gather_gradient(
    op: tf.Operation, gradient: Any, admitted: tf.Tensor | None = None
) -> tuple[tf.IndexedSlices, None]:
    if graphs.is_function(op.graph) or op._get_control_flow_context() is not None:
        raise TableError(
            f"A lookup in the dynamic table '{_outside(op.inputs[0]).op.name}' inside tf.cond, "
            "tf.while_loop or tf.function has no gradient: look up outside, and choose among the "
            "rows inside."
        )
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, tf.shape(op.outputs[0])[0]
        )
    rows = op.inputs[1]
    if admitted is not None:
        has_row = tf.not_equal(admitted, -1)
        gradient = tf.boolean_mask(gradient, has_row)
        rows = dynamic_rows.updated(tf.boolean_mask(admitted, has_row))
    # Without a dense shape the gradient can't be made a matrix, which would be as large as all
    # reserved memory.
    return shard_gradients.of_shard(tf.IndexedSlices(gradient, rows, None)), None


def _outside(x: tf.Tensor) -> tf.Tensor:
    """Returns the tensor outside of a function or a branch that `x` captures."""
    while hasattr(x.graph, "captures"):
        outer = next((outer for outer, inner in x.graph.captures if inner is x), None)
        if outer is None:
            break
        x = outer
    return x
