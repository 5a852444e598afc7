"""CuPy compiles to PTX where a GPU is newer than NVRTC. No GPU is needed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from collective.ops import newer_gpus
from collective.ops.newer_gpus import VARIABLE
from tests.kernels.gpu import nvrtc


class Driver:
    """Stands for CUDA's driver library, with GPUs of these compute capabilities."""

    def __init__(self, *gpus: tuple[int, int], broken: bool = False):
        self._gpus = gpus
        self._broken = broken

    def cuInit(self, flags: int) -> int:
        return 100 if self._broken else 0  # CUDA_ERROR_NO_DEVICE

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self._gpus[device.value][{75: 0, 76: 1}[attribute]]
        return 0


def compiler(name: str = "nvidia-cuda-nvrtc-cu12") -> Any:
    if not nvrtc.is_installed(name):
        pytest.skip(f"{name} is missing; make setup installs it")
    return nvrtc._library(name)


def test_nvrtc_says_what_it_knows():
    assert newer_gpus.newest_known(compiler()) == 90  # of CUDA 12.2 and 12.5
    assert newer_gpus.newest_known(compiler("nvidia-cuda-nvrtc")) >= 120


@pytest.mark.parametrize(
    "driver, newest",
    [
        (Driver((9, 0), (12, 0), (10, 3)), 120),
        (Driver((8, 6)), 86),
        (Driver(), None),
        (Driver((9, 0), broken=True), None),
        (None, None),
    ],
)
def test_the_newest_gpu_is_the_drivers(driver: Driver | None, newest: int | None):
    assert newer_gpus.newest_gpu(driver) == newest


@pytest.mark.parametrize(
    "gpu, users, expected",
    [
        ((7, 0), None, None),
        ((9, 0), None, None),
        ((10, 0), None, "1"),
        ((12, 0), None, "1"),
        ((12, 0), "0", "0"),
    ],
)
def test_only_a_gpu_that_nvrtc_does_not_know_gets_ptx(
    monkeypatch: pytest.MonkeyPatch,
    gpu: tuple[int, int],
    users: str | None,
    expected: str | None,
):
    monkeypatch.setenv(VARIABLE, users or "")
    if users is None:
        monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(newer_gpus, "preloaded_nvrtc", compiler)
    monkeypatch.setattr(newer_gpus, "_library", lambda *_: Driver(gpu))
    newer_gpus.before_cupy()
    assert os.environ.get(VARIABLE) == expected


def test_without_nvrtc_cupy_chooses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(newer_gpus, "preloaded_nvrtc", lambda: None)
    monkeypatch.setattr(newer_gpus, "_library", lambda *_: Driver((12, 0)))
    newer_gpus.before_cupy()
    assert VARIABLE not in os.environ
