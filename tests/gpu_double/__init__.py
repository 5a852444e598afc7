"""Stands in for a GPU: the emulator runs the kernels, and the host's memory is in the place of the
GPU's. By it all that is built upon the kernels runs on a CPU, slowly.

    tests.gpu_double.use()                          # in a process, before its first graph
    python -m tests.gpu_double SCRIPT [ARGUMENT...]    # a program, also under the launcher
    python -m tests.gpu_double -m MODULE [ARGUMENT...]
"""

from __future__ import annotations

from typing import Any


def device_operations() -> Any:
    """Makes the operations of the binding to TensorFlow, with the emulator's kernels."""
    import tensorflow.compat.v1 as tf

    from collective.ops.gpu.tensorflow_binding import DeviceOperations
    from tests.kernels.gpu.emulator.bridge import EmulatedBridge

    class DoubleOperations(DeviceOperations):
        def _built(self, *inputs: Any, **attributes: Any) -> Any:
            build = super()._built
            if not tf.executing_eagerly():
                return build(*inputs, **attributes)

            def built() -> Any:
                made = build(*inputs, **attributes)
                return None if isinstance(made, tf.Operation) else made

            # Only a graph has operations with the emulator's label.
            return tf.wrap_function(built, [])()

    return DoubleOperations(EmulatedBridge())


def use() -> None:
    """Has the double compute from now on in this process."""
    from collective.ops import kernel_device

    kernel_device.use(device_operations)
