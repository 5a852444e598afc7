"""Refuses an optimizer that can't update a table in a GPU's memory.

TensorFlow has some updates only for CPUs. It would refuse the graph when a session starts, without
naming the table or optimizer; or, with soft placement, move the table to the CPU, away from its
lookups. Other updates exist for GPUs, but copy the whole variable, which ends the process if that
is a dynamic table's address space (`row_writes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops import kernel_device
from collective.ops.graph import graph_analysis
from collective.ops.graph.gpu_kernels import gpu_kernel
from collective.tables.table import Table
from collective.tensorflow_internals.graphs import config
from collective.tensorflow_internals.optimizers import optimizer


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
    # A TensorFlow that was built without GPUs has kernels only for CPUs, even if something stands
    # in for a GPU.
    return (
        isinstance(variable, Table)
        and kernel_device.on_device(variable.hashed)
        and tf.test.is_built_with_cuda()
    )


def check(optimizer_: Any, variable: Any) -> None:
    """Checks that an optimizer's update of a variable has kernels on its device.

    Args:
        optimizer_: of TensorFlow 1, or Keras's legacy one; it has made its update.
        variable: a table, or any other variable.

    Raises:
        TableError: the table is on a GPU, where the update isn't possible.
    """
    if not _is_on_device(variable):
        return
    slots = [optimizer_.get_slot(variable, name) for name in optimizer_.get_slot_names()]
    for updated in (variable, *slots):
        for op in _users(updated.handle) if hasattr(updated, "handle") else ():
            if gpu_kernel(op) is None:
                dtype = variable.dtype.base_dtype.name
                _refuse(optimizer_, variable, f"has {op.type} of {dtype} for CPUs only")
            if variable.hashed and _copies_all(op):
                _refuse(optimizer_, variable, f"does {op.type} on a copy in the host's memory")


def _users(handle: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that use a variable in the graph that is being built."""
    graph = tf.get_default_graph()
    stack = [graph.capture(handle) if hasattr(graph, "outer_graph") else handle]
    while stack:
        for op in stack.pop().consumers():
            if op.type in graph_analysis.PASSES:
                stack += op.outputs
            else:
                yield op


def _copies_all(op: tf.Operation) -> bool:
    """Tells whether TensorFlow's kernel for GPUs copies the whole variable to the host and back."""
    if not op.type.startswith("ResourceScatter"):
        return False
    is_of_integers = not op.type.startswith("ResourceScatterNd") and op.get_attr("dtype").is_integer
    return is_of_integers or config.is_op_determinism_enabled()


def _refuse(optimizer_: Any, table: Table, reason: str) -> None:
    """Raises the error that names what can be done."""
    setting = f"{kernel_device.DYNAMIC}=host" if table.hashed else f"{kernel_device.CHOICE}=cpu"
    raise TableError(
        f"table '{table.op.name}' is in a GPU's memory, where {type(optimizer_).__name__} can't "
        f"update it: TensorFlow {reason}. Use another optimizer, or keep the table in the host's "
        f"memory: {setting} in the environment."
    )
