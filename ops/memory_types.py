"""Tells which inputs and outputs of an operation that was placed on a GPU are in its memory.

Some are in the host's, as the operation's kernel says.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels


def is_on_device(x: tf.Tensor) -> bool:
    """Tells whether an operation on a GPU leaves `x` in its memory."""
    return is_on_gpu(x.op) and x.value_index not in _places_on_host(x.op, x.op.op_def.output_arg)


def is_taken_on_device(op: tf.Operation, place: int) -> bool:
    """Tells whether `op` is on a GPU and takes input `place` in its memory."""
    return is_on_gpu(op) and place not in _places_on_host(op, op.op_def.input_arg)


def is_on_gpu(op: tf.Operation) -> bool:
    """Tells whether `op` was placed on a GPU."""
    return bool(tf.DeviceSpec.from_string(op.device).device_type == "GPU")


def _places_on_host(op: tf.Operation, arguments: Iterable[Any]) -> set[int]:
    on_host = _arguments_on_host(op.type)
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


@functools.cache
def _arguments_on_host(op_type: str) -> frozenset[str]:
    found = kernels.get_registered_kernels_for_op(op_type).kernel
    return frozenset(
        name for kernel in found if kernel.device_type == "GPU" for name in kernel.host_memory_arg
    )
