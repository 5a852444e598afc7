"""Rank cases are reported one by one, whatever becomes of the ranks."""

import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
import os, pathlib, time
import pytest

pytest_plugins = ["tests.rank_plugin"]

def meet(name):
    if "COLLECTIVE_TEST_FOLDER" in os.environ:
        folder = pathlib.Path(os.environ["COLLECTIVE_TEST_FOLDER"], name)
        folder.mkdir(exist_ok=True)
        (folder / os.environ["HOROVOD_RANK"]).touch()
        while len(list(folder.iterdir())) < int(os.environ["HOROVOD_SIZE"]):
            time.sleep(0.01)

# The ranks go on in step: no case begins before every rank has reported the one before.
def pytest_runtest_setup(item):
    meet("before " + item.name)

@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    yield
    meet("after " + pyfuncitem.name)
"""

CASES = """
import os, sys, time
import pytest

rank = int(os.environ.get("HOROVOD_RANK", -1))

def test_passes(): pass

@pytest.mark.sample(2)
@pytest.mark.parametrize("x", ["a b", "ü[1]"])
def test_names(x): print("said", x)

def test_fails_on_rank_1():
    print("rank", rank, "was here")
    assert rank != 1, "only there"

@pytest.mark.skip(reason="not today")
def test_skipped(): pass

@pytest.mark.ranks(1, 3)
def test_marked(): assert rank < int(os.environ["HOROVOD_SIZE"])

@pytest.mark.backends("hb", "sok")
def test_backends(): assert os.environ["COLLECTIVE_STRATEGY"] in ("hb", "sok")

@pytest.fixture
def broken():
    yield
    assert rank != 1, "while it is torn down"

def test_torn_down(broken): pass

CRASHES
def test_after(): pass
"""

CRASH = """
def test_crashes():
    if rank == 1:
        os.write(2, b"last words")
        os._exit(9)
    time.sleep(20)
"""

HANG = """
@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(30)  # on all: the rank whose time is up first ends the others
"""


@pytest.fixture
def run(tmp_path):
    """Returns run(cases, *options) -> (exit code, {name: outcome}, output)."""

    def run(cases, *options):
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\nrank_cases = cases\nmarkers = long\nxfail_strict = true\n"
        )
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "cases").mkdir(exist_ok=True)
        (tmp_path / "cases" / "test_some.py").write_text(cases)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVE")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--junitxml", "out.xml", *options],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(ROOT)},
            text=True,
            timeout=100,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(done.stdout)
        found = {}
        for case in xml.etree.ElementTree.parse(tmp_path / "out.xml").iter("testcase"):
            found[case.get("name")] = case[0].tag if len(case) else "passed"
        return done.returncode, found, done.stdout

    return run


@pytest.mark.matrix
def test_cases_have_their_own_outcomes(run):
    code, found, output = run(CASES.replace("CRASHES", ""))
    assert code == 1
    assert found == {
        "test_passes[2-sok]": "passed",
        "test_names[a b-2-sok]": "passed",
        r"test_names[\xfc[1]-2-sok]": "passed",
        "test_fails_on_rank_1[2-sok]": "failure",
        "test_skipped[2-sok]": "skipped",
        "test_marked[2-sok]": "passed",
        "test_backends[2-hb]": "passed",
        "test_torn_down[2-sok]": "error",
        "test_after[2-sok]": "passed",
    }
    assert "only there" in output and "while it is torn down" in output
    assert "rank 0 was here" in output and "rank 1 was here" in output
    code, found, output = run(CASES.replace("CRASHES", ""), "--lf")
    assert set(found) == {"test_fails_on_rank_1[2-sok]", "test_torn_down[2-sok]"}


@pytest.mark.matrix
def test_the_cases_after_a_crash_run(run):
    code, found, output = run(CASES.replace("CRASHES", CRASH), "-k", "passes or crashes or after")
    assert code == 1 and "last words" in output and "in this case, on rank" in output
    assert found == {
        "test_passes[2-sok]": "passed",
        "test_crashes[2-sok]": "failure",
        "test_after[2-sok]": "passed",
    }


@pytest.mark.matrix
def test_a_case_that_hangs_is_ended(run):
    code, found, output = run(CASES.replace("CRASHES", HANG), "-k", "passes or hangs or after")
    assert code == 1 and "time.sleep(30" in output, "the stacks of the case that hung"
    assert [*found.values()] == ["passed", "failure", "passed"]


@pytest.mark.matrix
def test_ranks_that_can_not_start(run):
    """Rank 1 collects nothing."""
    cases = "import os\nassert os.environ.get('HOROVOD_RANK') != '1'" + CASES
    code, found, output = run(cases.replace("CRASHES", ""))
    assert code == 1 and "assert os.environ" in output
    assert output.count("not every rank came to a first case") > 3
    failed = {name for name, outcome in found.items() if outcome == "failure"}
    assert failed == {"test_passes[2-sok]", "test_backends[2-hb]"}
    assert {*found.values()} == {"failure", "error"}


@pytest.mark.matrix
def test_one_case_in_chosen_configurations(run):
    cases = CASES.replace("CRASHES", "")
    _, found, _ = run(cases, "-k", "passes", "--ranks", "1,3", "--backend", "hb")
    assert found == {"test_passes[1-hb]": "passed", "test_passes[3-hb]": "passed"}
    _, found, _ = run(cases, "cases/test_some.py::test_marked[3-hb]", "--tier", "all")
    assert found == {"test_marked[3-hb]": "passed"}


WAITS = """
import os, pathlib, time

def wait_for(name):
    end = time.monotonic() + 60
    while not pathlib.Path(name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.01)

def test_waits_for_the_other_launch():
    size = int(os.environ["HOROVOD_SIZE"])
    pathlib.Path(f"came_{size}").touch()
    wait_for(f"came_{3 - size}")
"""


@pytest.mark.matrix
def test_launches_run_in_parallel_with_others_and_with_tests_of_one_process(run, tmp_path):
    (tmp_path / "neighbours").mkdir()
    neighbour = WAITS.partition("def test")[0] + "def test_waits_for_ranks(): wait_for('came_1')"
    (tmp_path / "neighbours" / "test_neighbour.py").write_text(neighbour)
    code, found, _ = run(WAITS, "--ranks", "1,2", "--backend", "hb")
    assert code == 0
    # Ranks are reported last.
    assert [*found] == [
        "test_waits_for_ranks",
        *(f"test_waits_for_the_other_launch[{n}-hb]" for n in (1, 2)),
    ]
