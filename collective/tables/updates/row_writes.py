"""Writes rows of tables and of their slots in place.

On a GPU, a compiled operation does it. There, TensorFlow's scatters of integers, and of all types
if operations must be deterministic, copy the whole variable to the host and back. This is slow for
a static table, and an illegal access that ends the process for the address space of a dynamic one.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import kernel_device
from collective.ops.exchange import dispatch
from collective.tables.rows.reserved_variable import ReservedVariable
from collective.tables.table import Sharded


def on_device(holder: Any) -> bool:
    """Tells whether a variable is a table or slot in memory where kernels compute."""
    if isinstance(holder, ReservedVariable):
        return holder.on_device
    return isinstance(holder, Sharded) and kernel_device.on_device(dynamic=False)


def read(holder: Any, rows: tf.Tensor) -> tf.Tensor:
    """Returns local rows [K] of a variable: [K, ...]."""
    return tf.raw_ops.ResourceGather(
        resource=holder.handle, indices=rows, dtype=holder.dtype.base_dtype
    )


def write(holder: Any, rows: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    """Gives local rows [K] of a variable, each once, the values [K, ...]."""
    if on_device(holder):
        on_device_: tf.Operation = dispatch.operations().collective_write_rows(
            holder.handle, tf.cast(rows, tf.int64), values
        )
        return on_device_
    in_host_memory: tf.Operation = tf.raw_ops.ResourceScatterUpdate(
        resource=holder.handle, indices=rows, updates=values
    )
    return in_host_memory


def add(holder: Any, rows: tf.Tensor, amounts: tf.Tensor) -> tf.Operation:
    """Adds [K, ...] to distinct local rows [K] of a variable."""
    if on_device(holder):
        return write(holder, rows, read(holder, rows) + amounts)
    added: tf.Operation = tf.raw_ops.ResourceScatterAdd(
        resource=holder.handle, indices=rows, updates=amounts
    )
    return added


def subtract(holder: Any, rows: tf.Tensor, amounts: tf.Tensor) -> tf.Operation:
    """Subtracts [K, ...] from distinct local rows [K] of a variable."""
    if on_device(holder):
        return write(holder, rows, read(holder, rows) - amounts)
    subtracted: tf.Operation = tf.raw_ops.ResourceScatterSub(
        resource=holder.handle, indices=rows, updates=amounts
    )
    return subtracted
