"""A job of which a rank dies starts again by itself, and ends with the weights of another that
nobody has disturbed, bit by bit.
"""

from __future__ import annotations

import os
import random
import re

import pytest

from tests.jobs import pool
from tests.jobs.test_preemption import PROGRAM, trained

SEED = int(os.environ.get("COLLECTIVE_TEST_SEED") or 1)
STEPS = 18


def restarted(folder, *events, ranks=2, restarts=3, options=()):
    """Runs a job with these events to its end; returns its code, output and weights."""
    folder.mkdir()
    limits = ("--max-restarts", restarts, "--restart-pause", 0.1)
    start = ("-np", ranks, "--device", "cpu", *limits, *options)
    done = pool.launch(*start, PROGRAM, folder, STEPS, *events, timeout=150)
    return done.returncode, done.stdout, set(re.findall("weights (.*)", done.stdout))


def undisturbed(folder, ranks):
    folder.mkdir()
    return trained(folder, STEPS, ranks)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_job_of_which_ranks_die_ends_with_the_very_weights(tmp_path):
    code, output, weights = restarted(tmp_path / "job", "1:6:kill", "0:14:raise")
    assert code == 0 and weights == undisturbed(tmp_path / "other", 2) and len(weights) == 1
    assert "root cause: rank 1 of 2" in output and "root cause: rank 0 of 2" in output
    saved = tmp_path / "job" / "saved" / "model.ckpt"
    assert f"  restart    1 of 3 in 0.1 s, from step 4, '{saved}-4'" in output
    assert f"  restart    2 of 3 in 0.2 s, from step 12, '{saved}-12'" in output
    assert output.count("began at 4\n") == output.count("began at 12\n") == 2


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_a_job_goes_on_at_its_last_increment(tmp_path):
    """Whole checkpoints are saved at steps 0 and 12, and when it begins again; it dies at 8 and 10.

    Twice it dies before a new whole checkpoint, and each time it has got on.
    """
    events = ("increments:3", "1:8:kill", "0:10:kill", "1:17:raise")
    code, output, weights = restarted(tmp_path / "job", *events)
    assert code == 0 and weights == undisturbed(tmp_path / "other", 2) and len(weights) == 1
    saved = tmp_path / "job" / "saved" / "model.ckpt"
    assert f"in 0.1 s, from step 6, '{saved}-0.increment-2'" in output
    assert f"in 0.2 s, from step 9, '{saved}-6.increment-1'" in output
    assert f"in 0.4 s, from step 15, '{saved}-9.increment-2'" in output
    assert [output.count(f"began at {step}\n") for step in (0, 6, 9, 15)] == [2, 2, 2, 2]


@pytest.mark.sample(1)
@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3, 1])
def test_seeded_deaths(tmp_path, ranks):
    draw = random.Random(SEED + ranks)
    steps = sorted(draw.sample(range(1, STEPS), 3))
    kinds = ["kill", "exit:3", "raise"]
    events = [f"{draw.randrange(ranks)}:{step}:{draw.choice(kinds)}" for step in steps]
    print(f"COLLECTIVE_TEST_SEED={SEED}", events)
    code, output, weights = restarted(tmp_path / "job", *events, ranks=ranks)
    assert code == 0 and weights == undisturbed(tmp_path / "other", ranks) and len(weights) == 1


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_a_failure_that_comes_again_at_the_same_step_ends_the_job(tmp_path):
    code, output, weights = restarted(tmp_path / "job", "1:6:always:exit:3", restarts=9)
    assert (code, weights) == (3, set())
    assert output.count("root cause: rank 1") == 2
    assert "no restart: it has failed after step 6 twice in a row" in output


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_an_elastic_job_goes_on_without_the_rank_that_died(tmp_path):
    """It restores on fewer ranks. Its sums have another order: the weights are nearly the same."""
    options = ("--elastic", "--min-np", 2)
    code, output, weights = restarted(
        tmp_path / "job", "2:6:kill", "1:14:kill", ranks=3, options=options
    )
    assert code == 0 and len(weights) == 1
    assert "restart    1 of 3 in 0.1 s on 2 ranks, from step 4" in output
    assert "restart    2 of 3 in 0.2 s, from step 12" in output
    for ranks, attempt in ((3, 0), (2, 1), (2, 2)):
        assert output.count(f"attempt {attempt} of {ranks} ranks") == ranks


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_rank_that_stands_still_is_a_failure_too(tmp_path):
    options = ("--stall-timeout", 4, "--grace", 1)
    code, output, weights = restarted(tmp_path / "job", "1:6:stop", options=options)
    assert code == 0 and weights == undisturbed(tmp_path / "other", 2)
    assert "the job stalled: rank 1 of 2 is missing" in output
    assert "restart    1 of 3" in output
