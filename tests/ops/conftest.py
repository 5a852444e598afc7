"""What computes around an exchange: a test of `bags` that asks for `computing` runs with the
binding to TensorFlow, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from collective.ops import dispatch
from collective.ops.gpu import sides
from collective.ops.gpu.binding import Bound
from tests.ops.gpu.emulator.side import EmulatedGpu


def bind(side: sides.Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on kernels stand in for the compiled operations."""
    bound = Bound(side)
    monkeypatch.setattr(dispatch, "chosen", lambda: "double")
    monkeypatch.setattr(dispatch, "_stand_in", lambda: bound)


@pytest.fixture(params=["compiled", "bound"])
def computing(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The compiled operations, or the binding with NumPy's references."""
    if request.param == "bound":
        bind(sides.Double(), monkeypatch)
    yield request.param


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding with the kernels themselves, on the emulator."""
    bind(EmulatedGpu(seed=5), monkeypatch)
