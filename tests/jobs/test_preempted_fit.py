"""`fit` that is told to stop stops on all ranks after the same step, and goes on from there."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM

import numpy as np
import pytest

from tests.jobs import pool
from tests.jobs.resumable_fit import STEPS
from tests.jobs.test_preemption import Training, check_stopped, tell

PROGRAM = Path(__file__).with_name("resumable_fit.py")
EPOCHS = 2


def fit(folder, ranks, *options):
    return pool.launch("-np", ranks, "--device", "cpu", PROGRAM, folder, EPOCHS, *options)


def plain_weights(folder):
    folder.mkdir()
    assert fit(folder, 1, "plain").returncode == 0
    return np.load(folder / "weights1.0.npy")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "ranks, told, steps, options",
    [
        (2, "1:step:13", 14, ()),
        pytest.param(1, "0:step:4", 4, ("unknown",), marks=pytest.mark.matrix),
        pytest.param(3, "2:between:4", 4, ("unknown",), marks=pytest.mark.matrix),
        pytest.param(2, "0:step:9", 9, ("eager", "unknown"), marks=pytest.mark.matrix),
        # Rank 1 answers rank 0 then, or is the one that is told before it does.
        pytest.param(2, "0:validated:11", 9, ("unknown",), marks=pytest.mark.matrix),
        pytest.param(2, "1:validated:2", 9, (), marks=pytest.mark.matrix),
        pytest.param(3, "0:validated:11", 9, ("eager",), marks=pytest.mark.matrix),
        pytest.param(1, "0:validated:3", 9, ("eager", "unknown"), marks=pytest.mark.matrix),
    ],
)
def test_fit_goes_on_after_the_step_that_was_saved(tmp_path, ranks, told, steps, options):
    folder = tmp_path / "job"
    folder.mkdir()
    done = fit(folder, ranks, told, *options)
    assert done.returncode == 143 and "Traceback" not in done.stdout
    assert f"all ranks stopped after step {steps}; its last" in done.stdout
    assert f"model.ckpt-{steps}'" in done.stdout and "went on" not in done.stdout
    resumed = fit(folder, ranks, told, *options)
    assert resumed.returncode == 0
    assert resumed.stdout.count(f"at {EPOCHS * STEPS}") == ranks
    want = plain_weights(tmp_path / "plain")
    for rank in range(ranks):
        got = np.load(folder / f"weights{ranks}.{rank}.npy")
        # Adam divides by the roots of small moments.
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


@pytest.mark.matrix
@pytest.mark.timeout(150)
@pytest.mark.parametrize("who, ranks", [("launcher", 2), ("all", 2), ("one rank", 2)])
def test_a_scheduler_tells_fit(tmp_path, who, ranks):
    training = Training(tmp_path / "job", ranks, program=PROGRAM)
    training.wait_for("validated.0", 1)
    tell(training, who, SIGTERM)
    done = training.end()
    if who == "launcher":
        check_stopped(training, done)
    assert done.returncode == 143 and training.saved_step() >= STEPS


@pytest.mark.matrix
@pytest.mark.timeout(150)
@pytest.mark.parametrize("options", [(), ("eager",)])
def test_fit_without_a_checkpoint_ends(tmp_path, options):
    (tmp_path / "job").mkdir()
    done = fit(tmp_path / "job", 2, "1:between:4", "unsaved", *options)
    assert done.returncode == 143
    assert "Traceback" not in done.stdout and "went on" not in done.stdout
    assert "SIGTERM: all ranks stop after this step" in done.stdout
