"""`gpu_check` with fewer keys, without checks, and with families side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from collective.ops import gpu_check
from collective.ops.gpu import checks
from collective.ops.gpu.checks import processes
from tests.kernels.gpu.emulator import EmulatedDevice


def one_of(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Lets `gather` have one check, which notes its scale; a measurement is noted, too."""
    seen: list[object] = []

    def one(device: object, scale: checks.Scale, rng: object) -> None:
        seen.append(scale)

    monkeypatch.setattr(gpu_check, "CupyDevice", lambda pooled: EmulatedDevice())
    monkeypatch.setattr(
        gpu_check, "measure", lambda device, families, scale, *_, **__: seen.append(scale.keys)
    )
    monkeypatch.setattr(checks.family("gather"), "CHECKS", (one,))
    return seen


def test_keys_are_of_the_checks_only(monkeypatch: pytest.MonkeyPatch):
    seen = one_of(monkeypatch)
    assert gpu_check.main(["--family", "gather", "--keys", "70000"]) == 0
    assert seen == [checks.FULL._replace(keys=70000), checks.FULL.keys]


def test_without_checks_it_only_times(monkeypatch: pytest.MonkeyPatch):
    seen = one_of(monkeypatch)
    assert gpu_check.main(["--family", "gather", "--no-checks", "--processes", "4"]) == 0
    assert seen == [checks.FULL.keys]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--no-checks", "--no-times"], "--no-checks with --no-times"),
        (["--no-checks", "--small"], "--no-checks with --small"),
        (["--keys", "10"], "--keys 10: the checks need 1,000 or more"),
        (["--processes", "0"], "--processes 0: give 1 or more"),
    ],
)
def test_options_that_make_no_sense(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as error:
        gpu_check.main(arguments)
    assert error.value.code == 2 and complaint in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "family, number",
    [(name, i) for name in checks.FAMILIES for i in range(len(checks.family(name).CHECKS))],
)
def test_the_fewest_keys_are_enough(family: str, number: int):
    scale = checks.SMALL._replace(keys=checks.FEWEST_KEYS)
    checks.family(family).CHECKS[number](EmulatedDevice(1), scale, np.random.default_rng(1))


# Stands in for gpu_check: says its family, leaves its pid, and does what the family is called.
_FAMILY = """
import os, pathlib, sys, time
family, folder = sys.argv[sys.argv.index("--family") + 1], pathlib.Path(sys.argv[1])
print("checks of", family, *sys.argv[4:], flush=True)
(folder / family).write_text(str(os.getpid()))
if family.startswith("alone"):
    (folder / "alone").mkdir()  # fails if another has done so
    time.sleep(0.1)
    (folder / "alone").rmdir()
if family == "faulty":
    os.abort()
while family == "slow" or len(list(folder.iterdir())) < int(sys.argv[2]):
    time.sleep(0.01)
sys.exit(family == "wrong")
"""


def program(folder: Path, together: int) -> list[str]:
    """Makes the program: it ends when so many have begun."""
    file = folder.parent / "family.py"
    file.write_text(_FAMILY)
    return [sys.executable, str(file), str(folder), str(together)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "begun"
    made.mkdir()
    return made


def test_families_run_side_by_side(folder: Path, capfd: pytest.CaptureFixture[str]):
    """None of the three ends before all have begun."""
    failed = processes.check(
        ["fine", "wrong", "faulty"], 3, ["--keys", "7"], program(folder, together=3)
    )
    said = capfd.readouterr().out
    assert failed == 2
    assert "---- fine: ok (" in said and "checks of fine fine --keys 7" in said
    assert "---- wrong: failed with exit code 1" in said
    assert "---- faulty: ended by SIGABRT" in said


def test_no_more_at_once_than_asked_for(folder: Path):
    names = ["alone 1", "alone 2", "alone 3"]
    assert processes.check(names, 1, [], program(folder, together=1)) == 0


def test_term_ends_all_and_says_what_was_said(folder: Path):
    run = (
        "from collective.ops.gpu.checks import processes\n"
        f"processes.check(['slow'], 1, [], {program(folder, together=1)!r})"
    )
    with subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True) as parent:
        deadline = time.monotonic() + 60
        while not (folder / "slow").exists() or not (folder / "slow").read_text():
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        parent.terminate()
        said = parent.communicate(timeout=60)[0]
    assert parent.returncode == 128 + signal.SIGTERM
    assert "---- slow: ended before it was done" in said and "checks of slow" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "slow").read_text()), 0)


def test_what_failed_side_by_side_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen = one_of(monkeypatch)
    given: list[object] = []

    def check(families: object, most: int, arguments: object) -> int:
        given.append((families, most, arguments))
        return 1

    monkeypatch.setattr(processes, "check", check)
    options = ["--processes", "4", "--keys", "2000", "--seed", "3"]
    assert gpu_check.main(["--family", "gather", "--family", "pool", *options]) == 1
    assert given == [(["gather", "pool"], 4, ["--no-times", "--seed", "3", "--keys", "2000"])]
    assert seen == [checks.FULL.keys], "the times are taken alone, after the checks"
    assert capsys.readouterr().err == "gpu_check: 1 family of 2 failed\n"
