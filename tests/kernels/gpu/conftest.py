"""Offers what compiled operations launch kernels by, in the place of CUDA's driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from collective.ops.gpu.tensorflow_binding import DeviceOperations
from tests.gpu_double import driver, hidden
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

if hidden.wanted():
    hidden.use()


@pytest.fixture(scope="module")
def frozen_objects() -> Iterator[None]:
    """Lets tests of a module collect garbage often: each time only what is new is looked at.

    TensorFlow alone has so many objects that looking at them all takes half a second.
    """
    yield
    gc.unfreeze()


@pytest.fixture
def stand_in(frozen_objects: None) -> Iterator[driver.StandIn]:
    made = driver.installed()
    made.reset()
    gc.collect()
    gc.freeze()
    others = set(made.events)
    yield made
    made.reset()
    gc.collect()  # A session's end is that of its object.
    assert set(made.events) <= others, "an event was left over"


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> DeviceOperations:
    """Has the emulator's kernels stand in for a GPU's."""
    return bind(EmulatedBridge(seed=3), monkeypatch)
