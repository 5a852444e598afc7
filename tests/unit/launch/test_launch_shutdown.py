"""Tests the shutdown of a job: which signals are sent, and when."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM

import pytest

from collective.launch.processes.shutdown import ShutdownSchedule


@pytest.mark.parametrize(
    "requests, expected",
    [
        ([(0, SIGTERM)], [(0, SIGTERM), (5, SIGKILL)]),
        ([(0, SIGINT)], [(0, SIGINT), (5, SIGTERM), (10, SIGKILL)]),
        ([(0, SIGHUP)], [(0, SIGHUP), (5, SIGTERM), (10, SIGKILL)]),
        ([(0, SIGQUIT)], [(0, SIGQUIT), (5, SIGTERM), (10, SIGKILL)]),
        ([(0, SIGINT), (1, SIGINT)], [(0, SIGINT), (1, SIGKILL)]),
        ([(0, SIGTERM), (0.5, SIGTERM)], [(0, SIGTERM), (5, SIGKILL)]),
        ([(0, SIGINT), (1, SIGTERM)], [(0, SIGINT), (1, SIGKILL)]),
        # Another signal is another wish, however soon it comes.
        ([(0, SIGINT), (0.2, SIGTERM)], [(0, SIGINT), (0.2, SIGKILL)]),
        ([(0, SIGTERM), (4, SIGINT)], [(0, SIGTERM), (4, SIGKILL)]),
        ([(0, SIGTERM), (4, SIGTERM)], [(0, SIGTERM), (4, SIGKILL)]),
        # Launcher and shell were told at one moment.
        ([(0, SIGTERM), (0, SIGTERM)], [(0, SIGTERM), (5, SIGKILL)]),
        # A later, gentler one puts off nothing.
        ([(0, SIGTERM), (4, SIGHUP)], [(0, SIGTERM), (4, SIGHUP), (5, SIGKILL)]),
        ([(0, SIGHUP), (4, SIGTERM)], [(0, SIGHUP), (4, SIGTERM), (9, SIGKILL)]),
    ],
)
def test_signals_and_their_times(requests, expected):
    schedule, sent = ShutdownSchedule(grace=5), []
    for now in sorted({*range(21), *(when for when, _ in requests)}):
        for when, signum in requests:
            if when == now:
                schedule.request(signum, now)
        sent += [(now, signum) for signum in schedule.take_due(now)]
    assert sent == expected


@pytest.mark.parametrize("signum", [SIGTERM, SIGINT])
@pytest.mark.parametrize("host, again", [("b", 0.01), ("b", 2.5), ("", None)])
def test_launchers_that_are_told_one_by_one_are_one_wish(signum, host, again):
    """srun and mpirun pass Ctrl-C on to all; Slurm tells each of TERM twice."""
    schedule = ShutdownSchedule(50)
    schedule.request(signum, 0)
    assert schedule.take_due(0) == [signum]
    schedule.request(signum, 0.1, "a")
    schedule.request(signum, 4, host)
    assert schedule.take_due(4) == ([] if host else [SIGKILL])
    if again:
        schedule.request(signum, 4 + again, host)
        is_same = again < 1 and signum == SIGTERM
        assert schedule.take_due(4 + again) == ([] if is_same else [SIGKILL])


def test_another_signal_to_another_host_is_another_wish():
    schedule = ShutdownSchedule(50)
    schedule.request(SIGTERM, 0)
    assert schedule.take_due(0) == [SIGTERM]
    schedule.request(SIGINT, 1, "a")
    assert schedule.take_due(1) == [SIGKILL]


def test_slurm_tells_more_than_once_and_kills_by_itself():
    schedule = ShutdownSchedule(grace=5, time_to_save=60, term_counts_once=True)
    for now in (0, 1, 7, 30):
        schedule.request(SIGTERM, now, "ab"[now % 2])
    assert schedule.take_due(59) == [SIGTERM]
    schedule.request(SIGINT, 59)
    assert schedule.take_due(59) == [SIGKILL]


def test_ranks_that_are_told_to_stop_have_longer():
    """Ranks that others have left have nothing to save."""
    sent = []
    for begin in ("request", "begin"):
        schedule = ShutdownSchedule(grace=5, time_to_save=60)
        getattr(schedule, begin)(SIGTERM, 0)
        sent.append(schedule.take_due(0) and schedule.next_time())
        assert schedule.was_requested == (begin == "request")
    assert sent == [60, 5]
    schedule = ShutdownSchedule(grace=5, time_to_save=60)
    schedule.request(SIGINT, 0)
    assert [schedule.take_due(time) for time in (0, 60, 65)] == [[SIGINT], [SIGTERM], [SIGKILL]]


def test_without_grace_all_comes_at_once():
    schedule = ShutdownSchedule(grace=0)
    schedule.begin(SIGTERM, 1)
    assert schedule.take_due(1) == [SIGTERM, SIGKILL]


def test_times_to_wait_for():
    schedule = ShutdownSchedule(grace=5)
    assert not schedule.begun
    assert schedule.next_time() == schedule.deadline(10) == float("inf")
    schedule.begin(SIGTERM, 2)
    assert schedule.begun and schedule.next_time() == 2
    schedule.take_due(2)
    assert (schedule.next_time(), schedule.deadline(10)) == (7, 17)
    schedule.take_due(7)
    assert (schedule.next_time(), schedule.deadline(10)) == (float("inf"), 17)
