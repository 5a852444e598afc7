"""Asks TensorFlow which of its operations have kernels on GPUs.

TensorFlow knows that even on a machine without a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow.compat.v1 as tf

from collective.tensorflow_internals.graphs import kernels

GPU = "GPU"


def gpu_kernel(op: tf.Operation) -> Any:
    """Describes the GPU kernel that `op` uses, as TensorFlow does; None if there is none."""

    def fits(kernel: Any) -> bool:
        return not kernel.label and all(
            set(_types(op, c.name)) <= set(c.allowed_values.list.type) for c in kernel.constraint
        )

    fitting = {kernel.device_type: kernel for kernel in _on_gpus(op.type) if fits(kernel)}
    return fitting.get(GPU, fitting.get("DEFAULT"))


@functools.cache
def _on_gpus(op_type: str) -> list[Any]:
    """Returns the kernels of a type of operation for GPUs, and those for any kind of device."""
    found = kernels.get_registered_kernels_for_op(op_type).kernel
    return [kernel for kernel in found if kernel.device_type in (GPU, "DEFAULT")]


def _types(op: tf.Operation, name: str) -> list[int]:
    found = op.get_attr(name)
    return [
        tf.as_dtype(x).as_datatype_enum
        for x in (found if isinstance(found, (list, tuple)) else [found])
    ]
