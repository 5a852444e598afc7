"""Tells which inputs and outputs of an operation on a GPU are in the GPU's memory.

Some are in the host's memory, as the operation's kernel says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.graph import gpu_kernels


def is_on_device(x: tf.Tensor) -> bool:
    """Tells whether an operation on a GPU leaves `x` in the GPU's memory."""
    return is_on_gpu(x.op) and x.value_index not in _places_on_host(x.op, x.op.op_def.output_arg)


def is_taken_on_device(op: tf.Operation, place: int) -> bool:
    """Tells whether `op` is on a GPU and takes input number `place` in the GPU's memory."""
    return is_on_gpu(op) and place not in _places_on_host(op, op.op_def.input_arg)


def is_on_gpu(op: tf.Operation) -> bool:
    """Tells whether `op` was placed on a GPU."""
    return bool(tf.DeviceSpec.from_string(op.device).device_type == "GPU")


def _places_on_host(op: tf.Operation, arguments: Iterable[Any]) -> set[int]:
    kernel = gpu_kernels.gpu_kernel(op)
    on_host = set() if kernel is None else set(kernel.host_memory_arg)
    names = [name for argument in arguments for name in _repeated(op, argument)]
    return {place for place, name in enumerate(names) if name in on_host}


def _repeated(op: tf.Operation, argument: Any) -> Iterator[str]:
    """Yields an argument's name, once for each of its tensors."""
    count = 1
    if argument.number_attr:
        count = op.get_attr(argument.number_attr)
    elif argument.type_list_attr:
        count = len(op.get_attr(argument.type_list_attr))
    for _ in range(count):
        yield argument.name
