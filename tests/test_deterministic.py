"""Two launches with scope(deterministic=True) on one number of ranks give the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def launch(ranks, folder, backend):
    """What each rank printed."""
    command = [
        sys.executable,
        "-m",
        "collective.launch",
        "-np",
        str(ranks),
        "--device",
        "cpu",
        "--tee",
        "none",
        "--log-dir",
        str(folder),
        "tests/deterministic_training.py",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        timeout=240,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(
            os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONPATH=str(ROOT), COLLECTIVE_STRATEGY=backend
        ),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize("ranks, backend", [(2, "hb"), (3, "sok")])
def test_two_launches_give_the_same_bits(ranks, backend, tmp_path):
    one, other = (launch(ranks, tmp_path / str(i), backend) for i in range(2))
    assert one == other
