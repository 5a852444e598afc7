"""Binds emulated kernels to TensorFlow: all of a GPU's bridge but the pointers and the streams."""

from __future__ import annotations

from typing import Any

from collective.ops.gpu.memory_bridge import GpuBridge
from tests.gpu_double.bridge import HostBridge
from tests.kernels.gpu.emulator.device import EmulatedDevice


class EmulatedBridge(GpuBridge):
    """Shares the memory of tensors on the CPU with emulated kernels.

    Args:
        seed: of the order in which threads take turns.
    """

    placed, kind, label = None, "", "emulated"

    def __init__(self, seed: int = 0):
        self._begin(EmulatedDevice(seed))

    def shared(self, tensor: Any) -> Any:
        return HostBridge().shared(tensor)
