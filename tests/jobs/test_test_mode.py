"""`collective launch --test-mode` tries a script once: a batch, a checkpoint, an export, exit 0."""

from __future__ import annotations

import os
import re

import pytest

from tests.jobs import pool

PROGRAM = os.path.join(os.path.dirname(__file__), "tried_once.py")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "kind",
    [
        "by_estimator",
        "by_trainer",
        "by_monitored_session",
        "by_plain_session",
        "by_feeds",
        "to_the_end_of_data",
    ],
)
def test_a_script_is_tried_once(tmp_path, kind, ranks):
    folder = tmp_path / "job"
    folder.mkdir()
    start = ("-np", ranks, "--device", "cpu", "--test-mode")
    done = pool.launch(*start, PROGRAM, kind, folder, timeout=150)
    assert done.returncode == 0, done.stdout
    assert re.findall("evaluated (.*)", done.stdout) == ["1"] * ranks, done.stdout
    assert re.findall("saved (.*)", done.stdout) == ["model.ckpt-1"] * ranks
