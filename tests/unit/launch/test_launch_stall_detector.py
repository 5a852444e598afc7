"""Tests the stall detector: when a job stalls, and who is missing. No clock and no process."""

from __future__ import annotations

import os
import time

import pytest

from collective.job.progress_board import Phase, ProgressRecord
from collective.launch.progress.stall_detector import WARN_AFTER, WORK_FACTOR, StallDetector

AWAY, WORKING, RUNNING, AGREEING = Phase.AWAY, Phase.WORKING, Phase.RUNNING, Phase.AGREEING


def record(phase, passed=7, since=0, doing="runs loss:0"):
    return ProgressRecord(os.getpid(), phase, passed, since, doing, "collective.t.keys")


def stalls_reported(records, timeout, until, exited=(), congested=()):
    """Returns (second, stall) of each report on ranks that post nothing, checked every second."""
    detector = StallDetector(len(records), timeout, 0.0)
    reported = []
    for second in range(1, until + 1):
        stall = detector.check(float(second), records, dict(exited), second in congested)
        if stall is not None:
            reported.append((second, stall))
            if stall.expired:
                break
    return reported


@pytest.mark.parametrize(
    "records, missing, words",
    [
        ([record(RUNNING), record(AWAY)], (1,), "in no run"),
        ([record(AGREEING), record(AWAY), record(AWAY)], (1, 2), "ranks 1, 2 of 3 are missing"),
        ([None, record(RUNNING), record(RUNNING)], (0,), "has not come to a first run yet"),
        ([record(RUNNING), record(RUNNING)], (), "all ranks are in the same run"),
        (
            [record(RUNNING, 6), record(AGREEING, 7)],
            (0,),
            "Others have finished what rank 0 is still in",
        ),
        (
            [record(RUNNING, 6), record(AWAY, 7)],
            (1,),
            "Others have finished what rank 0 is still in",
        ),
        ([record(Phase.ANSWERING), record(AWAY)], (1,), "answering the others' evaluation"),
        ([record(Phase.EQUALISING)] + [None] * 7, tuple(range(1, 8)), "ranks 1-7"),
    ],
)
def test_who_is_missing(records, missing, words):
    ((second, stall),) = stalls_reported(records, timeout=50, until=200)
    assert (second, stall.expired, stall.missing) == (51, True, missing)  # first seen at 1
    assert words in stall.report(50) and "runs loss:0" in stall.report(50)


def test_ranks_outside_of_any_run_never_stall():
    assert not stalls_reported([record(AWAY), None, record(WORKING)], timeout=10, until=5000)


def test_a_warning_comes_once_before_the_end():
    (warning, end) = stalls_reported([record(RUNNING), record(AWAY)], timeout=600, until=1000)
    assert (warning[0], warning[1].expired) == (1 + WARN_AFTER, False)
    assert (end[0], end[1].expired) == (601, True)
    assert "the job ends after 600 s" in warning[1].report(600)


def test_progress_restarts_the_time():
    detector = StallDetector(2, 10, 0.0)
    for second in range(1, 100):
        records = [record(RUNNING, since=second // 8), record(AWAY)]
        assert detector.check(second, records, {}, False) is None, second
    reported = [detector.check(second, records, {}, False) for second in range(100, 107)]
    assert reported[:-1] == [None] * 6 and reported[-1].expired  # 10 s after the change at 96


def test_each_kind_is_warned_of_once():
    detector, warned = StallDetector(2, 600, 0.0), []
    for second in range(1, 1000):
        absent = record(AWAY) if second < 500 else record(WORKING)
        reported = detector.check(second, [record(RUNNING, since=second // 100), absent], {}, False)
        if reported is not None:
            warned.append((second, reported.records[1].phase))
    assert [phase for _, phase in warned] == [AWAY, WORKING]


def test_work_gives_more_time_but_not_for_ever():
    records = [record(RUNNING), record(WORKING, doing="writing checkpoint 'c'"), record(RUNNING)]
    reported = stalls_reported(records, timeout=100, until=5000)
    (warned_at, warning), (ended_at, end) = reported
    assert (warned_at, warning.expired) == (61, False)
    assert (ended_at, end.expired) == (WORK_FACTOR * 100, True)
    assert end.missing == (1,) and "writing checkpoint 'c'" in end.report(100)


def test_a_rank_that_has_finished_its_work_late_is_given_time_to_come():
    detector = StallDetector(2, 100, 0.0)
    for second in range(1, 400):
        detector.check(second, [record(RUNNING), record(WORKING)], {}, False)
    away = [record(RUNNING), record(AWAY)]
    reported = [detector.check(second, away, {}, False) for second in range(400, 501)]
    assert [bool(stall and stall.expired) for stall in reported] == [False] * 100 + [True]


def test_a_rank_that_comes_late_gives_all_of_them_time():
    detector, late = StallDetector(2, 10, 0.0), [record(RUNNING), record(AWAY)]
    for second in range(1, 10):
        assert detector.check(second, late, {}, False) is None
    both = [record(RUNNING), record(RUNNING)]
    reported = [detector.check(second, both, {}, False) for second in range(10, 21)]
    assert reported[:-1] == [None] * 10 and reported[-1].expired


def test_time_without_a_reader_of_the_output_does_not_count():
    records = [record(RUNNING), record(AWAY)]
    ((second, _),) = stalls_reported(records, timeout=50, until=500, congested=range(20, 220))
    assert second == 51 + 200


def test_time_in_which_the_launcher_was_stopped_does_not_count():
    detector = StallDetector(2, 50, 0.0)
    records = [record(RUNNING), record(AWAY)]
    assert detector.check(1, records, {}, False) is None
    assert detector.check(1000, records, {}, False) is None
    assert detector.check(1004, records, {}, False) is None
    for second in range(1005, 1049):
        assert detector.check(second, records, {}, False) is None
    assert detector.check(1051, records, {}, False).expired


def test_a_rank_that_has_left_is_missing():
    ((_, stall),) = stalls_reported(
        [record(RUNNING), record(RUNNING)], timeout=5, until=50, exited={1: "exit code 0"}
    )
    assert stall.missing == (1,) and "rank 1     has left with exit code 0" in stall.report(5)


def test_a_page_that_was_not_whole_is_what_it_was_before():
    detector = StallDetector(2, 5, 0.0)
    for second in range(1, 6):
        records = [record(RUNNING) if second % 2 else None, record(AWAY)]
        assert detector.check(second, records, {}, False) is None
    assert detector.check(6, [None, None], {}, False).missing == (1,)


def test_ranks_that_do_the_same_share_a_line():
    since = time.monotonic_ns()
    running, away = record(RUNNING, since=since), record(AWAY, since=since)
    records = [running, running, running, away, running]
    ((_, stall),) = stalls_reported(records, timeout=5, until=9)
    lines = stall.report(5).splitlines()
    assert any(line.startswith("  ranks 0-2, 4 in a run since ") for line in lines)
    assert any(
        line.startswith("  rank 3     in no run since ") and f"pid {os.getpid()}" in line
        for line in lines
    )
    assert "             with collective.t.keys" in lines


@pytest.mark.parametrize("size, timeout", [(1, 600), (4, 0)])
def test_nobody_checks(size, timeout):
    assert StallDetector(size, timeout, 0.0).next_check() == float("inf")


@pytest.mark.parametrize("timeout, interval", [(2, 0.25), (8, 1.0), (600, 1.0)])
def test_how_often_it_is_checked(timeout, interval):
    detector = StallDetector(2, timeout, 5.0)
    assert detector.next_check() == 5.0 + interval
    detector.check(7.0, [None, None], {}, False)
    assert detector.next_check() == 7.0 + interval


def first_end(records_at, on_gpus):
    """Returns when a job with a timeout of 100 s is ended, and the report."""
    detector = StallDetector(2, 100, 0.0, on_gpus)
    for second in range(1, 2000):
        stall = detector.check(float(second), records_at(second), {}, False)
        if stall is not None and stall.expired:
            return second, stall.report(100)
    raise AssertionError("it never ends")


def test_on_gpus_the_first_run_of_a_kind_may_compile():
    """TensorFlow's kernels are compiled at their first use where the GPU is newer than they are."""

    def both(second):
        return [record(RUNNING), record(AWAY)]

    assert first_end(both, on_gpus=False)[0] == 101
    ended, report = first_end(both, on_gpus=True)
    assert ended == 1 + WORK_FACTOR * 100 - 1
    assert "compiling TensorFlow's kernels" in report and "CUDA_CACHE_PATH" in report


def test_on_gpus_a_later_run_of_the_same_kind_compiles_nothing():
    def both(second):
        return [record(RUNNING, passed=min(second, 5)), record(AWAY)]

    ended, report = first_end(both, on_gpus=True)
    assert ended == 105 and "compiling" not in report


def test_on_gpus_another_kind_of_run_may_compile_again():
    def both(second):
        first = record(RUNNING, passed=second) if second < 5 else record(RUNNING, 9, doing="runs b")
        return [first, record(AWAY)]

    assert first_end(both, on_gpus=True)[0] == 5 + WORK_FACTOR * 100 - 1


def test_agreeing_on_a_run_is_not_finishing_it():
    def both(second):
        return [record(AGREEING if second < 3 else RUNNING), record(AWAY)]

    assert first_end(both, on_gpus=True)[0] == 3 + WORK_FACTOR * 100 - 1


def test_ranks_have_ten_minutes_to_join():
    """As they may prepare data before; whatever the time of a run."""
    warned, ended = stalls_reported([record(Phase.MEETING, 0), None], timeout=50, until=900)
    assert (warned[0], ended[0]) == (1 + WARN_AFTER, 601)
    assert not warned[1].expired and ended[1].expired and ended[1].missing == (1,)
    assert "waiting for all ranks to join" in ended[1].report(50)
    text = warned[1].report(50)
    assert "ends after 600 s without progress" in text and "only a longer --stall-timeout" in text
    ((second, _),) = stalls_reported([record(Phase.MEETING, 0), record(RUNNING)], 50, 900)
    assert second == 51


def test_a_rank_that_leaves_before_it_joins_ends_the_others():
    records, exited = [record(Phase.MEETING, 0), None], {1: "exit code 0"}
    ((second, stall),) = stalls_reported(records, 50, 900, exited=exited)
    assert second == 6 and stall.missing == (1,)
    report = stall.report(50)
    assert "rank 1     has left with exit code 0" in report
    assert "because a rank has left" in report and "make a CollectiveStrategy" in report
    assert not stalls_reported([None, None], 50, 900, exited=exited)
    joined = [record(Phase.MEETING, 0), record(AWAY, 0)]
    assert stalls_reported(joined, 50, 30, exited=exited) == []
