"""The binding to TensorFlow with kernels that run on the emulator: all of a GPU's side but the
pointers and the streams.
"""

from __future__ import annotations

from typing import Any

from collective.ops.gpu import sides
from tests.ops.gpu.emulator.device import EmulatedDevice


class EmulatedGpu(sides.Gpu):
    """Kernels on the CPU, on tensors that are there.

    Args:
        seed: of the order in which threads take turns.
    """

    placed, kind = None, ""

    def __init__(self, seed: int = 0):
        self._begin(EmulatedDevice(seed))

    def shared(self, tensor: Any) -> Any:
        return sides.Double().shared(tensor)
