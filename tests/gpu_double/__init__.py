"""Stands in for a GPU: NumPy's references in the place of the kernels, and the host's memory in the
place of the GPU's. By it all that is built upon the kernels runs on a CPU, slowly.

    tests.gpu_double.use()                          # in a process, before its first graph
    python -m tests.gpu_double SCRIPT [ARGUMENT...]    # a program, also under the launcher
    python -m tests.gpu_double -m MODULE [ARGUMENT...]
"""

from __future__ import annotations

from typing import Any


def device_operations() -> Any:
    """Makes the operations of the binding to TensorFlow, with the double's kernels."""
    from collective.ops.gpu.tensorflow_binding import DeviceOperations
    from tests.gpu_double.bridge import HostBridge

    return DeviceOperations(HostBridge())


def use() -> None:
    """Has the double compute from now on in this process."""
    from collective.ops import placement

    placement.use(device_operations)
