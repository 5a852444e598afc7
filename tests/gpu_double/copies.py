"""Tells what TensorFlow would copy from one memory to the other, on a machine with a GPU.

A kernel for a GPU takes some of its inputs in the host's memory, as its registration says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from tests.gpu_double import placer


class Copy(NamedTuple):
    """Describes a tensor that is copied, once for all that take it there.

    Attributes:
        up: whether it goes to the GPU.
        tensor: it.
        users: the operations that take it.
    """

    up: bool
    tensor: tf.Tensor
    users: tuple[tf.Operation, ...]

    def __str__(self) -> str:
        users = ", ".join(f"{user.type} {user.name}" for user in self.users)
        made_by, dtype = self.tensor.op.type, self.tensor.dtype.name
        return f"{'up' if self.up else 'down'}: {dtype} {self.tensor.name} of {made_by} for {users}"


def copies(operations: Iterable[tf.Operation]) -> list[Copy]:
    """Returns what a run of `operations`, all of one graph, takes from the other memory."""
    operations = list(operations)
    devices = placer.devices(operations[0].graph)
    found: dict[tuple[bool, str], list[tuple[tf.Tensor, tf.Operation]]] = {}
    for op in operations:
        in_host = _in_host_memory(op, devices[op.name], op.op_def.input_arg)
        for x, to_host in zip(op.inputs, in_host, strict=True):
            outputs = _in_host_memory(x.op, devices[x.op.name], x.op.op_def.output_arg)
            from_host = outputs[x.value_index]
            if x.dtype != tf.resource and to_host != from_host:
                found.setdefault((from_host, x.name), []).append((x, op))
    return [
        Copy(up, taken[0][0], tuple(dict.fromkeys(op for _, op in taken)))
        for (up, _), taken in found.items()
    ]


def _in_host_memory(op: tf.Operation, device: str, arguments: Sequence[Any]) -> list[bool]:
    """Tells of each input or output of `op` whether it is in the host's memory."""
    in_host = () if device == "CPU" else _gpu_kernel(op).host_memory_arg
    found = []
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = op.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        found += [device == "CPU" or argument.name in in_host] * count
    return found


def _gpu_kernel(op: tf.Operation) -> Any:
    """Describes the kernel for GPUs that `op` takes, as TensorFlow does."""

    def fits(kernel: Any) -> bool:
        return not kernel.label and all(
            set(_types(op, c.name)) <= set(c.allowed_values.list.type) for c in kernel.constraint
        )

    found = [k for k in kernels.get_registered_kernels_for_op(op.type).kernel if fits(k)]
    by_device = {kernel.device_type: kernel for kernel in found}
    return by_device["GPU"] if "GPU" in by_device else by_device["DEFAULT"]


def _types(op: tf.Operation, name: str) -> list[int]:
    found = op.get_attr(name)
    return [
        tf.as_dtype(x).as_datatype_enum
        for x in (found if isinstance(found, (list, tuple)) else [found])
    ]
