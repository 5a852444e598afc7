"""Starts without the launcher: one rank, and the errors that come before any rank does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", **environment),
        timeout=120,
    )


@pytest.mark.slow
def test_one_rank_without_the_launcher():
    done = python(
        "from collective import CollectiveStrategy as C; s = C(); print(s.rank(), "
        "s.world_size(), s.local_rank())"
    )
    assert done.stdout.split()[-3:] == ["0", "1", "0"]


@pytest.mark.slow
def test_backends_are_named():
    done = python(
        "from collective import CollectiveStrategy; CollectiveStrategy()", COLLECTIVE_STRATEGY="ps"
    )
    assert done.returncode == 1 and "COLLECTIVE_STRATEGY=ps" in done.stdout
    assert "no such backend. Known: hb, sok" in done.stdout


@pytest.mark.slow
def test_one_process_needs_no_horovod():
    done = python(
        "import sys; sys.modules['horovod'] = None; from collective import CollectiveStrategy; "
        "print(CollectiveStrategy().world_size())"
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "1"


@pytest.mark.slow
def test_a_rank_that_needs_horovod_is_told():
    done = python(
        "import sys; sys.modules['horovod'] = None; from collective import CollectiveStrategy; "
        "CollectiveStrategy()",
        HOROVOD_RANK="0",
        HOROVOD_SIZE="2",
        HOROVOD_LOCAL_RANK="0",
        HOROVOD_LOCAL_SIZE="1",
    )
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert "several hosts exchange by Horovod, which isn't installed" in last
    assert "make setup" in last


def test_unknown_names():
    done = python('import collective; print("Table" in dir(collective)); collective.Nothing')
    assert "True" in done.stdout and "has no attribute 'Nothing'" in done.stdout
