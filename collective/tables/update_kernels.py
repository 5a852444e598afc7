"""Refuses an optimizer that can't update a table where it is, in a GPU's memory.

TensorFlow has some updates for CPUs only. It would refuse the graph when a session starts, without
a word of table or optimizer; or, told to place softly, take the table to the CPU, away from its
lookups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.training import optimizer

from collective.errors import TableError
from collective.ops import graph_analysis, graphs, placement
from collective.ops.gpu_kernels import gpu_kernel
from collective.tables.table import Table


def checked(processor: Any, variable: Any) -> Any:
    """Returns an optimizer's processor of a variable, or one that checks its updates of a table.

    Args:
        processor: applies gradients to the variable.
        variable: a table, or any other variable.
    """
    return _CheckedProcessor(processor, variable) if _is_on_device(variable) else processor


class _CheckedProcessor(optimizer._OptimizableVariable):
    def __init__(self, processor: Any, table: Table):
        self._processor, self._table = processor, table

    def target(self) -> Any:
        return self._processor.target()

    def update_op(self, optimizer_: Any, gradient: Any) -> Any:
        updated = self._processor.update_op(optimizer_, gradient)
        check(optimizer_, self._table)
        return updated


def _is_on_device(variable: Any) -> bool:
    # Built without GPUs, TensorFlow has kernels for CPUs only, whatever stands in for a GPU.
    return (
        isinstance(variable, Table)
        and placement.on_device(variable.hashed)
        and tf.test.is_built_with_cuda()
    )


def check(optimizer_: Any, variable: Any) -> None:
    """Checks that an optimizer's update of a variable has kernels where that is.

    Args:
        optimizer_: of TensorFlow 1, or Keras's legacy one; it has made its update.
        variable: a table, or any other variable.

    Raises:
        TableError: the table is on a GPU, and the update isn't possible there.
    """
    if not _is_on_device(variable):
        return
    slots = [optimizer_.get_slot(variable, name) for name in optimizer_.get_slot_names()]
    for updated in (variable, *slots):
        for op in _users(updated.handle) if hasattr(updated, "handle") else ():
            if gpu_kernel(op) is None:
                _refuse(optimizer_, variable, op)


def _users(handle: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that use a variable in the graph that is being built."""
    graph = tf.get_default_graph()
    stack = [graph.capture(handle) if graphs.is_function(graph) else handle]
    while stack:
        for op in stack.pop().consumers():
            if op.type in graph_analysis.PASSES:
                stack += op.outputs
            else:
                yield op


def _refuse(optimizer_: Any, table: Table, op: tf.Operation) -> None:
    """Raises the error that names what can be done."""
    setting = f"{placement.DYNAMIC}=host" if table.hashed else f"{placement.CHOICE}=cpu"
    raise TableError(
        f"table '{table.op.name}' is in a GPU's memory, where {type(optimizer_).__name__} can't "
        f"update it: TensorFlow has {op.type} of {table.dtype.base_dtype.name} for CPUs only. Use "
        "another optimizer, or keep the table in the host's memory: "
        f"{setting} in the environment."
    )
