"""Every check and measurement of the kernels, on the double and at small sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collective.ops import gpu_check
from collective.ops.gpu import checks
from collective.ops.gpu.checks import FAMILIES, SMALL, Check, timing
from collective.ops.gpu.device import Timed
from tests.kernels.gpu.emulator import EmulatedDevice

CHECKS = [
    pytest.param(check, id=f"{name}-{check.__name__}")
    for name in FAMILIES
    for check in checks.family(name).CHECKS
]


@pytest.mark.slow
@pytest.mark.sample(14)
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_agree_with_their_references(check: Check, seed: int):
    check(EmulatedDevice(seed), SMALL, np.random.default_rng(seed))


def test_every_module_of_checks_is_named():
    folder = Path(checks.__file__).parent
    others = {"__init__", "inputs", "processes", "pytorch", "timing", "workload"}
    assert {file.stem for file in folder.glob("*.py")} == others | set(FAMILIES)


@pytest.mark.matrix
def test_what_is_measured_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    device = EmulatedDevice()
    rows = gpu_check.measure(device, FAMILIES, SMALL, 0, repeats=1)
    gpu_check.write(tmp_path / "gpu.json", device, rows)
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert len(written) == len(rows) and {row["kernel"] for row in written} >= {
        "gather",
        "distinct, uniform",
    }
    assert {
        "kernel",
        "dim",
        "dtype",
        "ms",
        "gb_per_s",
        "percent_of_copy",
        "gkeys_per_s",
        "gpu",
        "date",
    } <= set(written[0])
    assert all(row["ms"] > 0 and row["gb_per_s"] > 0 for row in written)
    assert "a copy from device to device moves" in capsys.readouterr().out


def test_measured_speeds_are_of_the_right_unit():
    class Steady(EmulatedDevice):
        def timed(self, work, waits=False):
            work()
            return Timed(2.0, False)

    row = timing.row(Steady(), checks.Measurement("k", [lambda: None], 10**9, keys=10**6), 1e12)
    assert (row.ms, row.gb_per_s, row.percent_of_copy, row.gkeys_per_s) == (2, 500, 50, 0.5)


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    family = checks.family("gather")

    def wrong(device: object, scale: object, rng: object) -> None:
        raise AssertionError("three differ")

    monkeypatch.setattr(family, "CHECKS", (wrong, *family.CHECKS[2:3]))
    assert gpu_check.check(EmulatedDevice(), ["gather"], SMALL, 0) == 1
    said = capsys.readouterr().out
    assert "gather: wrong: WRONG\nthree differ" in said and "gather: nothing: ok" in said


def test_a_fault_of_the_gpu_ends_the_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Lost(EmulatedDevice):
        def synchronize(self):
            raise RuntimeError("cudaErrorIllegalAddress")

    def fine(device: object, scale: object, rng: object) -> None:
        pass

    monkeypatch.setattr(checks.family("gather"), "CHECKS", (fine, fine))
    assert gpu_check.check(Lost(), ["gather"], SMALL, 0) == 1
    told = capsys.readouterr()
    assert told.out.startswith("gather: fine: FAILED") and told.out.count("gather: fine") == 1
    assert "nothing can run on the GPU any more (cudaErrorIllegalAddress)" in told.err


def test_rows_are_kept_as_they_come():
    kept: list[int] = []
    rows = gpu_check.measure(
        EmulatedDevice(), ["gather"], SMALL, 0, repeats=1, keep=lambda rows: kept.append(len(rows))
    )
    assert kept == list(range(1, len(rows) + 1))


def test_small_checks_at_small_sizes_without_a_pool_and_times_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[object] = []

    def double(pooled: bool) -> EmulatedDevice:
        seen.append(pooled)
        return EmulatedDevice()

    def one(device: object, scale: checks.Scale, rng: object) -> None:
        seen.append(scale)

    monkeypatch.setattr(gpu_check, "CupyDevice", double)
    monkeypatch.setattr(gpu_check, "measure", lambda *_, **__: seen.append("measured"))
    monkeypatch.setattr(checks.family("gather"), "CHECKS", (one,))
    assert gpu_check.main(["--small", "--family", "gather"]) == 0
    assert gpu_check.main(["--family", "gather"]) == 0
    assert seen == [False, SMALL, True, checks.FULL, "measured"]


def test_without_a_gpu_it_says_so():
    finished = subprocess.run(
        [sys.executable, "-m", "collective.ops.gpu_check"],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert finished.returncode == 2 and finished.stdout == ""
    assert finished.stderr.startswith("gpu_check: CuPy can ")


def test_neither_tensorflow_nor_cupy_is_imported():
    program = (
        "import sys, collective.ops.gpu_check as g; [g.checks.family(n) for n in "
        "g.checks.FAMILIES]; "
        'print(*sorted({"tensorflow", "cupy", "horovod", "torch"} & set(sys.modules)))'
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        ).stdout
        == "\n"
    )
