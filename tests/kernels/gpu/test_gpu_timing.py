"""Checks the timer with a GPU with a clock of its own, and what rows say of the host."""

from __future__ import annotations

import sys
import types
from typing import Callable

import pytest

from collective.ops.gpu import checks
from collective.ops.gpu.checks import timing
from collective.ops.gpu.cupy_device import CupyDevice
from collective.ops.gpu.device import Timed
from tests.kernels.gpu.emulator import EmulatedDevice
from tests.kernels.gpu.test_gpu_device import cupy_double

FILL = 0.27  # milliseconds in which a GPU fills the timer's memory once


class Clocks:
    """When the host is where it is, and when the GPU will have done all that was launched.
    Milliseconds.
    """

    def __init__(self) -> None:
        self.host = self.gpu = 0.0
        self.runs = 0

    def launch(self, of_gpu: float, of_host: float = 0.001) -> None:
        self.host += of_host
        self.gpu = max(self.gpu, self.host) + of_gpu

    def wait(self) -> None:
        self.host = max(self.host, self.gpu)

    def work(
        self, launches: int, of_gpu: float, of_host: float, waiting_before: int = -1
    ) -> Callable[[], None]:
        """Makes so many launches; before one of them the host waits."""

        def run() -> None:
            self.runs += 1
            for number in range(launches):
                if number == waiting_before:
                    self.wait()
                self.launch(of_gpu, of_host)

        return run


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, clocks: Clocks) -> CupyDevice:
    class Event:
        def record(self) -> None:
            self.time = max(clocks.gpu, clocks.host)

        @property
        def done(self) -> bool:
            return self.time <= clocks.host

        def synchronize(self) -> None:
            clocks.host = max(clocks.host, self.time)

    cupy = cupy_double(1)
    cupy.cuda.Event = Event
    cupy.cuda.get_elapsed_time = lambda begin, end: end.time - begin.time
    cupy.empty = lambda shape, dtype: types.SimpleNamespace(fill=lambda value: clocks.launch(FILL))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return CupyDevice()


def test_few_launches_are_timed_at_once(device: CupyDevice, clocks: Clocks):
    assert (
        device.timed(clocks.work(5, 0.02, 0.1)) == (pytest.approx(0.1), False) and clocks.runs == 1
    )


@pytest.mark.parametrize("launches", [20, 200, 1500])
def test_launches_that_take_the_host_long_are_timed_after_more_filling(
    device: CupyDevice, clocks: Clocks, launches: int
):
    taken = device.timed(clocks.work(launches, 0.02, 0.1))
    assert taken == (pytest.approx(0.02 * launches), False) and clocks.runs > 1


def test_a_host_that_is_too_slow_is_said_to_be(device: CupyDevice, clocks: Clocks):
    taken = device.timed(clocks.work(2, 1.0, 1000.0))
    assert taken.idle and taken.ms > 500
    assert device.timed(clocks.work(2, 1.0, 0.1)) == (pytest.approx(2.0), False), (
        "of the next work nothing is said"
    )


def test_work_that_waits_is_timed_once_with_its_waits(device: CupyDevice, clocks: Clocks):
    taken = device.timed(clocks.work(4, 0.02, 0.1, waiting_before=2), waits=True)
    assert clocks.runs == 1 and taken == (pytest.approx(0.02 + 0.02 + 0.1 + 0.1 + 0.02), False)
    assert device.timed(clocks.work(4, 0.02, 0.1, waiting_before=2)).idle


def test_rows_say_what_of_the_host_is_in_them():
    class Timing(EmulatedDevice):
        def timed(self, work: Callable[[], object], waits: bool = False) -> Timed:
            return Timed(2.0, work() == "slow" and not waits)

    def host(run: Callable[[], object], waits: bool = False) -> str:
        return timing.row(
            Timing(), checks.Measurement("k", [lambda: None, run], 1, waits=waits), 1e12
        ).host

    assert (host(lambda: None), host(lambda: "slow"), host(lambda: "slow", waits=True)) == (
        "",
        "idle",
        "waits",
    )
    assert not timing.times(Timing(), [lambda: "slow"], waits=True).idle
