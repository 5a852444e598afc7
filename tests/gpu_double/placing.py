"""Says where TensorFlow would place the operations of a graph on a machine with one GPU, and what
would be copied there from one memory to the other.

TensorFlow knows its kernels for GPUs also on a machine without one. Its placer isn't to be had
without a device, so its rules are written down here (`placer.cc`), as far as our graphs need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.gpu_kernels import GPU, gpu_kernel

CPU = "CPU"
_METADATA = ("Shape", "ShapeN", "Size", "Rank")


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


def placed(targets: Sequence[tf.Operation]) -> dict[tf.Operation, str]:
    """Returns the devices of all operations that a run of `targets` executes.

    An operation is where a script wants it, or where the resource is that it uses. Else it is on
    the GPU, if it has a kernel for it; but where its input is if it only reads a shape, and where
    its users are if it has no input.
    """
    devices: dict[tf.Operation, str] = {}
    generators = []
    for op in _in_order(targets):
        wanted = tf.DeviceSpec.from_string(op.device).device_type if op.device else None
        resources = [x.op for x in op.inputs if x.dtype == tf.resource or x.dtype._is_ref_dtype]
        if wanted:
            devices[op] = wanted
        elif resources:
            devices[op] = devices[resources[0]]
        elif gpu_kernel(op) is None:
            devices[op] = CPU
        elif op.type in _METADATA:
            devices[op] = devices[op.inputs[0].op]
        else:
            devices[op] = GPU
            if not op.inputs and len(op.outputs) == 1:
                generators.append(op)
    for op in generators:
        users = {devices[user] for user in op.outputs[0].consumers() if user in devices}
        if len(users) == 1:
            devices[op] = users.pop()
    return devices


def _in_order(targets: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns `targets` and all that they wait for, each behind what it waits for."""
    done: dict[tf.Operation, None] = {}
    stack = list(targets)
    while stack:
        waited_for = [*(x.op for x in stack[-1].inputs), *stack[-1].control_inputs]
        missing = [op for op in waited_for if op not in done]
        stack += missing
        if not missing:
            done[stack.pop()] = None
    return list(done)


def copies(devices: dict[tf.Operation, str]) -> list[Copy]:
    """Returns what operations take in another memory than the one in which it is made."""
    found: dict[tuple[bool, str], list[tuple[tf.Tensor, tf.Operation]]] = {}
    for op, device in devices.items():
        in_host = _in_host_memory(op, device, op.op_def.input_arg)
        for x, to_host in zip(op.inputs, in_host, strict=True):
            from_host = _in_host_memory(x.op, devices[x.op], x.op.op_def.output_arg)
            if x.dtype != tf.resource and to_host != from_host[x.value_index]:
                found.setdefault((from_host[x.value_index], x.name), []).append((x, op))
    return [
        Copy(up, taken[0][0], tuple(dict.fromkeys(op for _, op in taken)))
        for (up, _), taken in found.items()
    ]


def _in_host_memory(op: tf.Operation, device: str, arguments: Sequence[Any]) -> list[bool]:
    """Tells of each input or output of `op` whether it is in the host's memory."""
    in_host = () if device == CPU else gpu_kernel(op).host_memory_arg
    found = []
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = op.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        found += [device == CPU or argument.name in in_host] * count
    return found
