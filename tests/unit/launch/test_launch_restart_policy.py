"""Tests what is decided after a failure: whether a job starts again, when, and on which devices."""

from __future__ import annotations

import dataclasses

import pytest

from collective.job.milestones import Milestones
from collective.launch.output.outcome import JobOutcome, RankExit
from collective.launch.planning.plan import LaunchPlan
from collective.launch.restarts import Failure, RestartPolicy, failure_of


def plan(devices=(None, None), **options):
    options = {"max_restarts": 100, "most_ranks": len(devices), **options}
    return LaunchPlan(("python",), devices, {}, 8, shown_ranks=frozenset(range(9)), **options)


def decisions(failures, first, visible_gpus=lambda: ()):
    """Returns the plan of each restart, and its pause; the last one is a text if there is none."""
    policy, current, decided = RestartPolicy(visible_gpus), first, []
    for failure in failures:
        decision = policy.decide(failure, current)
        if decision.restart is None:
            return [*decided, decision.text]
        current = decision.restart.plan
        decided.append((current.devices, decision.restart.pause))
    return decided


def failing(*steps, rank=0):
    return [Failure(rank, last_step=step, has_trained=step > 0) for step in steps]


def test_pauses_double_up_to_a_minute():
    decided = decisions(failing(*range(1, 9)), plan(restart_pause=1))
    assert [pause for _, pause in decided] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert decisions(failing(*range(1, 90)), plan(restart_pause=0))[-1][1] == 0


def test_a_job_without_restarts_says_nothing():
    assert decisions(failing(1), plan(max_restarts=0)) == [""]


def test_a_step_back_is_not_the_same_step():
    """Only a failure after the very same step is taken for one that comes again."""
    assert len(decisions(failing(7, 5, 7, 5), plan())) == 4
    assert "after step 5 twice" in decisions(failing(7, 5, 5), plan())[-1]


def test_a_newer_checkpoint_is_progress():
    first = Failure(0, last_step=9, has_trained=True)
    second = dataclasses.replace(first, checkpoint="m-9", checkpoint_step=9)
    assert len(decisions([first, second], plan())) == 2
    assert "after step 9 twice" in decisions([first, second, second], plan())[-1]


@pytest.mark.parametrize("size, least, sizes", [(4, 2, [3, 2, 2, 2]), (2, 1, [1, 1, 1, 1])])
def test_cpu_ranks_that_die_are_left_out(size, least, sizes):
    elastic = plan((None,) * size, min_ranks=least)
    decided = decisions(failing(1, 2, 3, 4), elastic)
    assert [len(devices) for devices, _ in decided] == sizes


def test_a_stall_leaves_out_nobody():
    stalls = [dataclasses.replace(failure, rank=None) for failure in failing(1, 2)]
    assert [len(d) for d, _ in decisions(stalls, plan((None,) * 3, min_ranks=1))] == [3, 3]
    assert [d for d, _ in decisions(failing(1, 2), plan())] == [(None, None)] * 2


def test_gpus_are_counted_again():
    visible = iter([("0", "1", "2"), ("0", "1", "2", "3", "4"), ("0",)])
    elastic = plan(("0", "1", "2", "3"), min_ranks=2)
    failures = failing(1, rank=0) + failing(2, rank=1) + failing(3, rank=2)
    decided = decisions(failures, elastic, lambda: next(visible))
    assert [devices for devices, _ in decided[:2]] == [("0", "1", "2"), ("0", "1", "2", "3")]
    assert decided[2] == "  no restart: 1 GPU is left, and --min-np asks for 2"


def test_a_gpu_that_fails_twice_in_a_row_is_left_out():
    elastic = plan(("0", "1", "2"), min_ranks=1)
    failures = failing(1, rank=1) + failing(2, rank=2) + failing(3, rank=2) + failing(4, rank=1)
    decided = decisions(failures, elastic, lambda: ("0", "1", "2"))
    assert [devices for devices, _ in decided] == 2 * [("0", "1", "2")] + 2 * [("0", "1")]


def test_the_ranks_that_are_shown_are_those_that_are_there():
    policy = RestartPolicy(lambda: ())
    restart = policy.decide(failing(1)[0], plan((None,) * 3, min_ranks=1)).restart
    assert restart.plan.shown_ranks == {0, 1} and restart.plan.restart_count == 1


def test_what_a_failure_depends_on():
    """The root cause's own steps count; the newest checkpoint is anybody's."""
    outcome = JobOutcome(2)
    words = ("Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "K: no")
    outcome.add(RankExit(1, 7, 1, 0.0, last_lines=words))
    milestones = [Milestones(5, 8, 10, "m-15", 15), Milestones(6, 7, 10, "m-10", 10)]
    assert failure_of(outcome, milestones) == Failure(1, 1, "K", 17, "m-15", 15, True)
    assert failure_of(JobOutcome(2), milestones) == Failure(None, 1, "", 18, "m-15", 15, True)


def test_a_host_that_was_lost_after_its_ranks_is_no_restart_either():
    """They had left with 0; another rank's failure comes later."""
    outcome = JobOutcome(2)
    outcome.add(RankExit(1, 11, 0, 1.0, host="b"))
    outcome.add(RankExit(0, 10, 5, 2.0, host="a"))
    failure = failure_of(outcome, [Milestones(), Milestones()], "b")
    decision = RestartPolicy(lambda: ()).decide(failure, plan())
    assert decision.restart is None
    assert decision.text.startswith("  no restart: host b is gone: start the job again")
