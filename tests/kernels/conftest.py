"""Chooses what computes around an exchange.

A test of `bags` that asks for `computing` runs with the binding to TensorFlow, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from collective.ops import kernel_device
from collective.ops.gpu.memory_bridge import MemoryBridge
from collective.ops.gpu.tensorflow_binding import DeviceOperations
from tests.kernels.gpu.emulator.bridge import EmulatedBridge


def bind(bridge: MemoryBridge, monkeypatch: pytest.MonkeyPatch) -> DeviceOperations:
    """Has kernels stand in for the compiled operations from now on, until the test ends."""
    bound = DeviceOperations(bridge)
    monkeypatch.setattr(kernel_device, "_injected", lambda: bound)
    monkeypatch.setattr(kernel_device, "injected", lambda: bound)
    return bound


@pytest.fixture(params=["compiled", "bound"])
def computing(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the compiled operations, or the binding with emulated kernels."""
    if request.param == "bound":
        bind(EmulatedBridge(), monkeypatch)
    yield request.param


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yields the binding with the kernels themselves, on the emulator."""
    bind(EmulatedBridge(seed=5), monkeypatch)
