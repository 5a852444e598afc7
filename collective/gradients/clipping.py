"""Clips and checks tables' gradients as those of the whole table, never of one rank's shard.

Repeated ids are summed first: a norm is that of the gradient as a matrix. Plain TensorFlow takes
each occurrence of a repeated id for a row of its own: a named difference.

A table's gradient is known by its `indices`, which stay the same tensor when a script scales or
clips it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import indexed_slices, tensor_conversion_registry

from collective.errors import TableError
from collective.ops import collectives, gate, graphs, shard_gradients
from collective.ops.graph_state import state_of


class TableGradient(tf.IndexedSlices):
    """Holds this rank's shard of the gradient of a table."""


def table_gradient(values: tf.Tensor, indices: tf.Tensor, dense_shape: Any) -> TableGradient:
    """Makes the gradient of a table, and notes its indices."""
    state_of(graphs.outermost(tf.get_default_graph())).table_gradient_indices.add(indices.name)
    return TableGradient(values, indices, dense_shape)


def is_of_table(gradient: Any) -> bool:
    """Tells whether `gradient` is a table's, as it was taken or as a script has changed it."""
    if not isinstance(gradient, tf.IndexedSlices) or not tf.is_symbolic_tensor(gradient.indices):
        return False
    known = state_of(graphs.outermost(gradient.indices.graph)).table_gradient_indices
    return isinstance(gradient, TableGradient) or gradient.indices.name in known


def _to_tensor(
    value: TableGradient, dtype: Any = None, name: str | None = None, as_ref: bool = False
) -> tf.Tensor:
    if collectives.size() > 1:
        raise TableError(
            f"The gradient '{value.values.op.name}' of a table would become a matrix of this "
            "rank's rows only. Keep it as IndexedSlices: tf.clip_by_global_norm, tf.clip_by_norm, "
            "tf.clip_by_value and tf.linalg.global_norm take it, and so does apply_gradients."
        )
    return indexed_slices._indexed_slices_to_tensor(value, dtype, name, as_ref)


tensor_conversion_registry.register_tensor_conversion_function(
    TableGradient, _to_tensor, priority=10
)


def global_norm(original: Any, t_list: Sequence[Any], name: str | None = None) -> tf.Tensor:
    """Stands in for `tf.linalg.global_norm`: a table's gradient counts whole, every shard once."""
    tables = [t for t in t_list if is_of_table(t)]
    others = [t for t in t_list if not is_of_table(t)]
    if not tables:
        return original(t_list, name)
    with tf.name_scope(name, "global_norm"):
        squares = tf.add_n([_sum_of_squares(t) for t in tables])
        if collectives.size() > 1:
            opened = gate.gates_of(tf.get_default_graph()).beside([squares]).zero
            squares = collectives.allreduce_sum(
                [squares], collectives.unique_name("global_norm"), opened
            )[0]
        if any(t is not None for t in others):
            squares += tf.square(tf.cast(original(others), squares.dtype))
        return tf.sqrt(squares)


def _sum_of_squares(gradient: tf.IndexedSlices) -> tf.Tensor:
    # A row's owner has all of its occurrences, whichever rank they come from.
    values, _ = shard_gradients.summed(gradient.values, gradient.indices)
    return tf.reduce_sum(tf.square(values))


def clip_by_norm(
    original: Any, t: Any, clip_norm: Any, axes: Any = None, name: str | None = None
) -> Any:
    """Stands in for `tf.clip_by_norm`: clips by the norm of the whole table's gradient."""
    if not is_of_table(t):
        return original(t, clip_norm, axes, name)
    if axes is not None:
        raise TableError(
            f"tf.clip_by_norm of a table's gradient '{t.values.op.name}' takes the norm of all of "
            "it: axes must be None."
        )
    norm, limit = global_norm(original, [t]), tf.cast(clip_norm, t.dtype)
    return table_gradient(t.values * (limit / tf.maximum(norm, limit)), t.indices, t.dense_shape)


def clip_by_value(original: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `tf.clip_by_value`: sums repeated ids first."""
    if not is_of_table(t):
        return original(t, *args, **kwargs)
    values, rows = shard_gradients.summed(t.values, t.indices)
    return table_gradient(original(values, *args, **kwargs), rows, t.dense_shape)


def clip_by_average_norm(original: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `tf.clip_by_average_norm`: refuses tables' gradients."""
    if is_of_table(t):
        raise TableError(
            f"tf.clip_by_average_norm of a table's gradient '{t.values.op.name}' isn't there; use "
            "tf.clip_by_norm."
        )
    return original(t, *args, **kwargs)


def is_all_finite(original: Any, gradients: Sequence[Any]) -> tf.Tensor:
    """Stands in for what optimizers that scale a loss decide by: all ranks decide alike.

    A row's gradient overflows on its owner alone. A rank that decided by its own shards would skip
    the step, and lower the scale, while others take it.
    """
    finite = original(gradients)
    if collectives.size() == 1 or not any(is_of_table(gradient) for gradient in gradients):
        return finite
    is_infinite = tf.cast(tf.logical_not(finite), tf.float32)
    opened = gate.gates_of(tf.get_default_graph()).beside([is_infinite]).zero
    ranks = collectives.allreduce_sum(
        [is_infinite], collectives.unique_name("is_all_finite"), opened
    )[0]
    return tf.equal(ranks, 0)
