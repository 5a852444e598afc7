"""Clips and checks tables' gradients as those of the whole table, never of one rank's shard.

Repeated ids are summed first, so a norm is that of the gradient as a matrix. Plain TensorFlow
treats each occurrence of a repeated id as a separate row, which is a documented difference.

A table's gradient is recognised by its `indices`, which stay the same tensor when a script scales
or clips it, or by what these are computed from.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.gradients import eager_table_gradient, rank_parts, table_gradients
from collective.ops.communication import collectives, gate
from collective.ops.graph import library_operations


def global_norm(original: Any, t_list: Sequence[Any], name: str | None = None) -> tf.Tensor:
    """Stands in for `tf.linalg.global_norm`: a table's gradient counts whole, every shard once."""
    if any(eager_table_gradient.is_one(t) for t in t_list):
        return eager_table_gradient.computed(
            "global_norm", lambda given: [global_norm(original, given)], list(t_list)
        )[0]
    tables = [t for t in t_list if rank_parts.is_part(t)]
    others = [t for t in t_list if not rank_parts.is_part(t)]
    if not tables:
        return original(t_list, name)
    with tf.name_scope(name, "global_norm"):
        with library_operations.noted(tf.get_default_graph()):
            squares = tf.add_n([_sum_of_squares(t) for t in tables])
            if collectives.size() > 1:
                opened = gate.gates_of(tf.get_default_graph()).of_collective([squares]).zero
                squares = collectives.allreduce_sum(
                    [squares], collectives.unique_name("global_norm"), opened
                )[0]
        if any(t is not None for t in others):
            squares += tf.square(tf.cast(original(others), squares.dtype))
        return tf.sqrt(squares)


def clip_by_global_norm(
    original: Any, t_list: Sequence[Any], clip_norm: Any, use_norm: Any = None, name: Any = None
) -> Any:
    """Stands in for `tf.clip_by_global_norm`, for gradients of tables that were taken eagerly.

    In graphs it is TensorFlow's, by a norm that counts whole tables.
    """
    t_list = list(t_list)
    if not any(eager_table_gradient.is_one(t) for t in t_list):
        return original(t_list, clip_norm, use_norm, name)
    numbers = [tf.convert_to_tensor(clip_norm, tf.float32)]
    numbers += [] if use_norm is None else [tf.convert_to_tensor(use_norm, tf.float32)]
    count = len(numbers)

    def clip(given: list[Any]) -> list[Any]:
        in_function, norm = original(given[count:], *given[:count])
        return [*in_function, norm]

    *clipped, norm = eager_table_gradient.computed("clip_by_global_norm", clip, [*numbers, *t_list])
    return clipped, norm


def _eagerly(function: Any, original: Any, t: Any, numbers: Sequence[Any]) -> Any:
    """Clips the gradient of a table that was taken eagerly, by numbers."""
    tensors = [tf.convert_to_tensor(number, t.dtype) for number in numbers]
    return eager_table_gradient.computed(
        function.__name__,
        lambda given: [function(original, given[-1], *given[:-1])],
        [*tensors, t],
    )[0]


def _sum_of_squares(gradient: tf.IndexedSlices) -> tf.Tensor:
    # A row's owner has all of its occurrences, from all ranks.
    return tf.reduce_sum(tf.square(table_gradients.distinct(gradient).values))


def clip_by_norm(
    original: Any, t: Any, clip_norm: Any, axes: Any = None, name: str | None = None
) -> Any:
    """Stands in for `tf.clip_by_norm`: clips by the norm of the whole table's gradient."""
    if eager_table_gradient.is_one(t) and axes is None:
        return _eagerly(clip_by_norm, original, t, [clip_norm])
    if not rank_parts.is_part(t):
        return original(t, clip_norm, axes, name)
    if axes is not None:
        raise TableError(
            f"tf.clip_by_norm of a table's gradient '{t.values.op.name}' takes the norm of all of "
            "it: axes must be None."
        )
    norm, limit = global_norm(original, [t]), tf.cast(clip_norm, t.dtype)
    return table_gradients.with_values(t, t.values * (limit / tf.maximum(norm, limit)))


def clip_by_value(original: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `tf.clip_by_value`: sums repeated ids first."""
    if eager_table_gradient.is_one(t):
        bound = inspect.signature(original).bind(t, *args, **kwargs).arguments
        return _eagerly(
            clip_by_value, original, t, [bound["clip_value_min"], bound["clip_value_max"]]
        )
    if not rank_parts.is_part(t):
        return original(t, *args, **kwargs)
    t = table_gradients.distinct(t)
    return table_gradients.with_values(t, original(t.values, *args, **kwargs))


def clip_by_average_norm(original: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `tf.clip_by_average_norm`: refuses tables' gradients."""
    if rank_parts.is_part(t):
        raise TableError(
            f"tf.clip_by_average_norm of a table's gradient '{t.values.op.name}' is not supported: "
            "use tf.clip_by_norm."
        )
    return original(t, *args, **kwargs)


def is_all_finite(original: Any, gradients: Sequence[Any]) -> tf.Tensor:
    """Replaces the check by which loss-scaling optimizers decide, so that all ranks decide the
    same.

    A row's gradient overflows only on its owner. If a rank decided by its own shards, it would skip
    the step and lower the scale while others take the step.
    """
    if collectives.size() == 1 or not any(rank_parts.is_part(gradient) for gradient in gradients):
        return original(gradients)
    with library_operations.noted(tf.get_default_graph()):
        is_infinite = tf.cast(tf.logical_not(original(gradients)), tf.float32)
        opened = gate.gates_of(tf.get_default_graph()).of_collective([is_infinite]).zero
        ranks = collectives.allreduce_sum(
            [is_infinite], collectives.unique_name("is_all_finite"), opened
        )[0]
        return tf.equal(ranks, 0)
