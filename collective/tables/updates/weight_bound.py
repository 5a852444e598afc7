"""Keeps the elements of updated rows within a bound: `TablePolicy.weight_bound`.

An optimizer updates rows as without a bound. Before anything that waits for the update continues,
the gradient's rows are clipped in place:

    gradient (values, rows) ──► update of table and slots ──► min(row, b) ──► max(row, -b)

A row without a gradient is left alone, even if the optimizer moves all rows like Adam: otherwise a
step would have to go over the whole table once more. Such a row is clipped with its next gradient.

On a GPU, a kernel that does the whole update clips the rows itself.

Minimum and maximum leave elements within the bound unchanged, bit for bit, and NaN, too. Unlike
writing back a clipped copy, they lose nothing of another update of the same row in the same run. On
a GPU it is such a copy (`row_writes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.updates import reduced_updates
from collective.policy import TablePolicy
from collective.tables.table import Table
from collective.tables.updates import row_writes
from collective.tensorflow_internals.optimizers import optimizer


def check(policy: TablePolicy, dtype: tf.DType, name: str) -> None:
    """Checks that a table can have the bound.

    Args:
        policy: the table's.
        dtype: its type.
        name: its name, for the message.

    Raises:
        ValueError: 0 is the only number of this type within the bound.
    """
    if policy.weight_bound is not None and not largest_within(policy.weight_bound, dtype) > 0:
        raise ValueError(
            f"table '{name}': weight_bound={policy.weight_bound!r} is too small for {dtype.name}: "
            "every weight would be 0."
        )


def largest_within(bound: float, dtype: tf.DType) -> Any:
    """Returns the largest number of a floating-point type that is no larger than `bound`."""
    with np.errstate(over="ignore"):
        rounded = np.asarray(bound, np.float64).astype(dtype.as_numpy_dtype)
    if np.float64(rounded) > bound:
        rounded = np.nextafter(rounded, np.zeros_like(rounded))
    return rounded


def _bound_of(table: Table) -> Any:
    return largest_within(float(table.policy.weight_bound or 0), table.dtype.base_dtype)


def bounded(processor: Any, variable: Any) -> Any:
    """Returns an optimizer's processor of a variable, or one that also keeps its rows within its
    bound.

    Args:
        processor: applies gradients to the variable, without a bound.
        variable: a table, or any other variable.
    """
    return _BoundedProcessor(processor, variable) if has_bound(variable) else processor


def has_bound(variable: Any) -> bool:
    """Tells whether `variable` is a table whose policy bounds its weights."""
    return isinstance(variable, Table) and variable.policy.weight_bound is not None


class _BoundedProcessor(optimizer._OptimizableVariable):
    def __init__(self, processor: Any, table: Table):
        self._processor, self._table = processor, table

    def target(self) -> Any:
        return self._processor.target()

    def update_op(self, optimizer_: Any, gradient: Any) -> tf.Operation:
        updated = self._processor.update_op(optimizer_, gradient)
        if reduced_updates.keep_within(float(_bound_of(self._table)), updated):
            return updated
        with tf.control_dependencies([updated]):
            return clip_rows(self._table, gradient)


def with_clipping(applied: Any, grads_and_vars: Sequence[Any]) -> Any:
    """Returns an operation that comes after an update, and after the clipping of its tables.

    Args:
        applied: the update's operation.
        grads_and_vars: the gradients that it applies, and their variables.

    Returns:
        `applied` itself if no table has a bound.
    """
    clipped = []
    with tf.control_dependencies([applied]):
        for gradient, variable in grads_and_vars:
            if gradient is not None and has_bound(variable):
                clipped.append(clip_rows(variable, gradient))
    return tf.group(applied, *clipped) if clipped else applied


def clip_rows(table: Table, gradient: Any) -> tf.Operation:
    """Clips the rows of this rank's shard that have a gradient, after the control dependencies.

    Args:
        table: has a bound.
        gradient: `IndexedSlices` of the shard, or a matrix for all of its rows.
    """
    rows = (
        gradient.indices
        if isinstance(gradient, tf.IndexedSlices)
        else tf.range(tf.shape(gradient, out_type=tf.int64)[0])
    )
    bound = _bound_of(table)
    with tf.name_scope("weight_bound"):
        if row_writes.on_device(table):
            # TensorFlow's minimum of NaN and a bound is not NaN on every device.
            values = row_writes.read(table, rows)
            values = tf.where_v2(values > bound, bound, values)
            values = tf.where_v2(values < -bound, -bound, values)
            return row_writes.write(table, rows, values)
        from_above = tf.raw_ops.ResourceScatterMin(
            resource=table.handle, indices=rows, updates=tf.constant(bound)
        )
        with tf.control_dependencies([from_above]):
            clipped: tf.Operation = tf.raw_ops.ResourceScatterMax(
                resource=table.handle, indices=rows, updates=tf.constant(-bound)
            )
    return clipped
