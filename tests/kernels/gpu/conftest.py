"""Offers what compiled operations launch kernels by, in the place of CUDA's driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collective.ops.gpu.tensorflow_binding import DeviceOperations
from tests.gpu_double import driver, hidden
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

if hidden.wanted():
    hidden.use()


@pytest.fixture
def stand_in() -> Iterator[driver.StandIn]:
    made = driver.installed()
    made.reset()
    yield made
    made.reset()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> DeviceOperations:
    """Has the emulator's kernels stand in for a GPU's."""
    return bind(EmulatedBridge(seed=3), monkeypatch)
