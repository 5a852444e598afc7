"""Makes the initial values of whole tables one after another.

An initializer that only knows how to make all rows is evaluated for the whole table on every rank,
which keeps its own. TensorFlow would start with those of all tables at the same time, and compute
constant ones before that, to see whether they are worth keeping with the graph. Here each holds a
lock from its first operation until its rows are taken, so that memory has only one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis

# A value of fewer bytes is made at any time.
LEAST_BYTES = 16 << 20
_LOCK = "MutexLock"


def own_rows(
    make: Callable[[], tf.Tensor], take: Callable[[tf.Tensor], tf.Tensor], size: int
) -> tf.Tensor:
    """Returns a rank's rows of a whole table's initial value.

    Args:
        make: makes the whole value.
        take: takes the rank's rows of it.
        size: the bytes of the whole value.
    """
    if size < LEAST_BYTES or tf.executing_eagerly():
        return take(make())
    before = tf.get_default_graph().version
    mutex = tf.raw_ops.MutexV2(shared_name="collective/whole_values")
    lock = tf.raw_ops.MutexLock(mutex=mutex)
    with tf.control_dependencies([lock]):
        value = make()
    makers = graph_analysis.upstream([value.op])
    # Operations are numbered as they are made; a session may have run older ones.
    _hide_constants(op for op in makers if op._id > before + 1)
    if any(op.type == _LOCK and op is not lock.op for op in makers):
        # It needs another table's value, which waits for the lock, too.
        _let_go(makers, lock.op)
        return take(value)
    with tf.control_dependencies([lock]):
        rows = take(value)
    with tf.control_dependencies([rows]):
        released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    with tf.control_dependencies([released]):
        return tf.identity(rows)


def _hide_constants(operations: Iterable[tf.Operation]) -> None:
    """Keeps TensorFlow from computing large constants before a run.

    What a stateful operation passes on is none; `Print` prints nothing here.
    """
    for op in operations:
        is_large = any(_bytes(x) >= LEAST_BYTES for x in op.outputs)
        if is_large and not op.op_def.is_stateful and op._get_control_flow_context() is None:
            for i, x in enumerate(op.inputs):
                if _bytes(x) < LEAST_BYTES and x.dtype.base_dtype != tf.resource:
                    op._update_input(i, tf.raw_ops.Print(input=x, data=[], first_n=0))


def _bytes(x: tf.Tensor) -> int:
    return (x.shape.num_elements() or 0) * int(x.dtype.size or 0)


def _let_go(operations: Iterable[tf.Operation], lock: tf.Operation) -> None:
    """Has operations not wait for the lock."""
    for op in operations:
        others = [x for x in op.control_inputs if x is not lock]
        if len(others) < len(op.control_inputs):
            op._remove_all_control_inputs()
            op._add_control_inputs(others)
