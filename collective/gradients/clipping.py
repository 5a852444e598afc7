"""Norms and clipping of tables' gradients: those of the whole table, repeated ids summed, never of
one rank's shard.

A table's gradient is known by its `indices`, which stay the same tensor when a script scales or
clips it. Plain TensorFlow takes each occurrence of a repeated id for a row of its own: a named
difference.
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
    """The gradient of a table: this rank's shard of it."""


def table_gradient(values: tf.Tensor, indices: tf.Tensor, dense_shape: Any) -> TableGradient:
    state_of(graphs.outermost(tf.get_default_graph())).table_gradient_indices.add(indices.name)
    return TableGradient(values, indices, dense_shape)


def is_of_table(gradient: Any) -> bool:
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    known = state_of(graphs.outermost(gradient.indices.graph)).table_gradient_indices
    return isinstance(gradient, TableGradient) or gradient.indices.name in known


def _to_tensor(
    value: TableGradient, dtype: Any = None, name: str | None = None, as_ref: bool = False
) -> tf.Tensor:
    if collectives.size() > 1:
        raise TableError(
            f"The gradient '{value.values.op.name}' of a table would become a matrix "
            f"of this rank's rows only. "
            "Keep it as IndexedSlices: tf.clip_by_global_norm, tf.clip_by_norm, "
            "tf.clip_by_value and "
            "tf.linalg.global_norm take it, and so does apply_gradients."
        )
    return indexed_slices._indexed_slices_to_tensor(value, dtype, name, as_ref)


tensor_conversion_registry.register_tensor_conversion_function(
    TableGradient, _to_tensor, priority=10
)


def global_norm(original: Any, t_list: Sequence[Any], name: str | None = None) -> tf.Tensor:
    """`tf.linalg.global_norm`, in which a table's gradient counts whole, every shard once.

    Repeated ids are summed first: the norm is that of the gradient as a matrix. (Plain TensorFlow
        takes each occurrence of a
    repeated id for a row of its own.)
    """
    tables = [t for t in t_list if is_of_table(t)]
    rest = [t for t in t_list if not is_of_table(t)]
    if not tables:
        return original(t_list, name)
    with tf.name_scope(name, "global_norm"):
        squares = tf.add_n([_squares(t) for t in tables])
        if collectives.size() > 1:
            opened = gate.gates_of(tf.get_default_graph()).beside([squares]).zero
            squares = collectives.allreduce_sum(
                [squares], collectives.unique_name("global_norm"), opened
            )[0]
        if any(t is not None for t in rest):
            squares += tf.square(tf.cast(original(rest), squares.dtype))
        return tf.sqrt(squares)


def _squares(gradient: tf.IndexedSlices) -> tf.Tensor:
    # Its owner has all of a row's occurrences, whichever rank they come from.
    return tf.reduce_sum(tf.square(shard_gradients.summed(gradient.values, gradient.indices)[0]))


def clip_by_norm(
    original: Any, t: Any, clip_norm: Any, axes: Any = None, name: str | None = None
) -> Any:
    """`tf.clip_by_norm`."""
    if not is_of_table(t):
        return original(t, clip_norm, axes, name)
    if axes is not None:
        raise TableError(
            f"tf.clip_by_norm of a table's gradient '{t.values.op.name}' takes the "
            f"norm of all of it: "
            "axes must be None."
        )
    norm, limit = global_norm(original, [t]), tf.cast(clip_norm, t.dtype)
    return table_gradient(t.values * (limit / tf.maximum(norm, limit)), t.indices, t.dense_shape)


def clip_by_value(original: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """`tf.clip_by_value`."""
    if not is_of_table(t):
        return original(t, *args, **kwargs)
    values, rows = shard_gradients.summed(t.values, t.indices)
    return table_gradient(original(values, *args, **kwargs), rows, t.dense_shape)


def clip_by_average_norm(original: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """`tf.clip_by_average_norm`."""
    if is_of_table(t):
        raise TableError(
            f"tf.clip_by_average_norm of a table's gradient '{t.values.op.name}' "
            f"isn't there; "
            "use tf.clip_by_norm."
        )
    return original(t, *args, **kwargs)
