"""A Trainer's job of which a rank dies goes on at its position, and ends with the very weights."""

from __future__ import annotations

import os
import re

import pytest

from tests.jobs import pool

PROGRAM = os.path.join(os.path.dirname(__file__), "trained_by_trainer.py")


def trained(folder, *events, ranks=2):
    """Runs the job; returns its output, and the line with the weights of each rank."""
    folder.mkdir()
    limits = ("--max-restarts", 2, "--restart-pause", 0.1)
    start = ("-np", ranks, "--device", "cpu", *limits)
    done = pool.launch(*start, PROGRAM, folder, *events, timeout=150)
    assert done.returncode == 0, done.stdout
    return done.stdout, set(re.findall("weights (.*)", done.stdout))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_dies_and_training_goes_on(tmp_path, ranks):
    """20 steps; checkpoints after each third and, with a validation, each fifth step."""
    output, weights = trained(tmp_path / "job", "1:8:kill", "0:16:raise", ranks=ranks)
    undisturbed = trained(tmp_path / "other", ranks=ranks)[1]
    assert weights == undisturbed and len(weights) == 1 and "after 20, loss" in output
    began = re.findall(r"^\[\d\] began at (\d+)$", output, re.M)
    assert began == ["0"] * ranks + ["6"] * ranks + ["15"] * ranks
