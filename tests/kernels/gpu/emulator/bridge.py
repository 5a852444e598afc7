"""Binds emulated kernels to TensorFlow: all of a GPU's bridge but the pointers and the streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable

from collective.ops.gpu.memory_bridge import GpuBridge
from tests.gpu_double import hidden
from tests.gpu_double.replay import replaying
from tests.kernels.gpu.emulator.device import EmulatedDevice


class EmulatedBridge(GpuBridge):
    """Shares the memory of tensors on the CPU with emulated kernels.

    Args:
        seed: of the order in which threads take turns; 0 for ascending order.
    """

    placed, kind, label = None, "", "emulated"

    def __init__(self, seed: int = 0):
        self._begin(EmulatedDevice(seed))

    @contextlib.contextmanager
    def call(self, stream: int | None = None) -> Iterator[None]:
        with super().call(stream), hidden.on_device():
            yield

    def replaying(self, step: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
        """Has compiled operations launch nothing inside, once `step` has run: see `replay`."""
        return replaying(step)
