"""Keeps tensors in the host's memory that are needed there: ids and optimizers' numbers.

TensorFlow places an operation on a GPU wherever there is a kernel for it. Most operations that
prune ids, reshape them or fill empty samples (`tf.nn.safe_embedding_lookup_sparse`, feature
columns) have one: ids would go to the GPU in every step, one by one, and come back to be checked.
So would a constant learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis, seen_operations

_CPU = {"device_type": "CPU", "device_index": 0}


def keep_on_host(tensors: Iterable[tf.Tensor]) -> None:
    """Places on the CPU the operations that compute those `tensors` that depend only on data.

    Operations that a script has placed stay there. TensorFlow chooses where to compute a tensor
    that needs a variable, another lookup, or anything that a script has on a GPU.
    """
    targets = [x.op for x in tensors]
    operations = graph_analysis.walk(targets, control=False)
    users: dict[tf.Operation, list[tf.Operation]] = {}
    for op in operations:
        for x in op.inputs:
            users.setdefault(x.op, []).append(op)
    of_device = [op for op in operations if _is_of_device(op)]
    need_device = graph_analysis.walk(of_device, lambda op: users.get(op, []), control=False)
    of_data = [op for op in targets if op not in need_device]
    for op in graph_analysis.walk(of_data, control=False):
        if _can_be_placed(op):
            op._set_device(tf.DeviceSpec.from_string(op.device).replace(**_CPU))


def _is_of_device(op: tf.Operation) -> bool:
    return (
        op.type in graph_analysis.VARIABLE_TYPES
        or graph_analysis.is_collective(op.type)
        or tf.DeviceSpec.from_string(op.device).device_type not in (None, "CPU")
    )


def _can_be_placed(op: tf.Operation) -> bool:
    """Tells whether neither the script nor a session has settled where `op` is."""
    return (
        tf.DeviceSpec.from_string(op.device).device_type is None
        and op.colocation_groups() == [f"loc:@{op.name}".encode()]
        and op._id > seen_operations.last(op.graph)
    )
