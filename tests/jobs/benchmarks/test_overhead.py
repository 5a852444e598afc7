"""Tests benchmarks/overhead.py: its arguments, its tables, and one real run at a tiny size. Nothing
is timed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import overhead  # noqa: E402
from training_step import parts as step_parts  # noqa: E402


def test_lists_and_checkouts_are_read_from_the_command_line():
    arguments = overhead.parse(["--ranks", "1,3", "--tables", "5", "--against", str(ROOT)])
    assert arguments.ranks == [1, 3] and arguments.tables == [5]
    assert overhead.libraries_of(arguments) == {"collective": ROOT, "against": ROOT}
    assert list(overhead.libraries_of(overhead.parse([]))) == ["collective"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tables", "26,0"], "at least 1"),
        (["--against", "/nowhere"], "/nowhere has no collective/__init__.py"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        overhead.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds(capsys: pytest.CaptureFixture[str]):
    rounds = [
        {"plain": 1.0, "collective": 3.0, "against": 2.0},
        {"plain": 2.0, "collective": 4.0, "against": 8.0},
        {"plain": 10.0, "collective": 70.0, "against": 70.0},
    ]
    returned = overhead.print_table(["ranks"], [(("1",), rounds)], against=True)
    assert capsys.readouterr().out == (
        "| ranks | plain | collective | ÷ plain | against | ÷ against |\n"
        "|---|---|---|---|---|---|\n"
        "| 1 | 2.00 | 4.00 | 3.00 | 8.00 | 1.000 |\n"
    )
    assert returned == {"1": rounds}


def test_a_figure_that_was_not_measured_is_an_empty_cell():
    assert overhead.cells([{"collective": 0.004}], against=False, digits=3) == ["", "0.004", ""]


def test_a_start_takes_as_long_as_its_slowest_rank():
    ranks = [{"model": 5.0, "first step": 1.0}, {"model": 3.0, "first step": 4.0}]
    assert overhead.slowest(ranks) == {"model": 3.0, "first step": 4.0, "all": 7.0}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("collective/agreement/meeting/collective.agreement", "agreement"),
        ("meeting/collective.group1.0a1b2c3d.keys", "keys"),
        ("meeting/collective.host>group1.0a1b2c3d.rows.1", "rows"),
        ("gradients/meeting/collective.group1.0a1b2c3d.rows.gradient", "gradients"),
        ("meeting/collective.dense_gradients.float32", "dense gradients"),
        ("meeting/collective.embedding_sizes", None),
        ("group1/keys", None),
    ],
)
def test_a_collective_is_known_by_its_name(name, part):
    assert step_parts.collective_of(name) == part


def test_waiting_ends_when_the_last_rank_has_come():
    first = {"keys": ("keys", 100.0, 200.0), "rows": ("rows", 300.0, 330.0)}
    second = {"keys": ("keys", 160.0, 210.0), "rows": ("rows", 290.0, 320.0)}
    times = {"wall": 1000.0, "span": 600.0, "gate": 50.0, "computing": 100.0}
    ranks = [{**times, "collectives": first}, {**times, "collectives": second}]
    parts = step_parts.parts_of(ranks)
    # The first rank waits 60 of 100, then neither, then the second one 10 of 30.
    microseconds = {
        "python": 400.0,
        "waiting": (60 + 10) / 2,
        "keys": (40 + 50) / 2,
        "rows": (30 + 20) / 2,
        "gate": 50.0,
        "computing": 100.0,
        "scheduling": 450 - (130 + 80) / 2,
    }
    assert parts == pytest.approx(
        {part: microseconds.get(part, 0.0) / 1e3 for part in step_parts.PARTS}
    )
    assert sum(parts.values()) == pytest.approx(1.0)


def test_importing_the_library_is_timed_without_tensorflow():
    assert 0 < overhead.import_seconds(overhead.LIGHT_IMPORT, ROOT) < 10


@pytest.mark.long
def test_a_tiny_run_measures_steps_and_starts():
    options = ["--ranks", "1", "--tables", "2", "--steps", "3", "--repeat", "1", "--json"]
    options += ["--only", "step", "dynamic", "start"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "overhead.py"), *options],
        cwd="/",
        timeout=250,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    (dynamic,) = figures["dynamic"]["1 collective"]
    assert min(dynamic["static"], dynamic["dynamic"]) > 0
    step, both = {"plain", "collective", "least collective"}, {"plain", "collective"}
    for part, name, columns in (
        ("step", "26 1", step),
        ("start", "2 all", both),
        ("start", "2 model", both),
    ):
        first = figures[part][name][0]
        assert set(first) == columns and min(first.values()) > 0
