"""How a job is brought to its end, and who is blamed: tables, without processes."""

from __future__ import annotations

import signal
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

import pytest

from collective.launch.fate import Exit, Fate
from collective.launch.stopping import Stopping


@pytest.mark.parametrize(
    "asked, expected",
    [
        ([(0, SIGTERM)], [(0, SIGTERM), (5, SIGKILL)]),
        ([(0, SIGINT)], [(0, SIGINT), (5, SIGTERM), (10, SIGKILL)]),
        ([(0, SIGHUP)], [(0, SIGHUP), (5, SIGTERM), (10, SIGKILL)]),
        ([(0, SIGINT), (1, SIGINT)], [(0, SIGINT), (1, SIGKILL)]),
        ([(0, SIGINT), (1, SIGTERM)], [(0, SIGINT), (1, SIGTERM), (6, SIGKILL)]),
        # A later, gentler one puts off nothing.
        ([(0, SIGTERM), (4, SIGINT)], [(0, SIGTERM), (4, SIGINT), (5, SIGKILL)]),
        ([(0, SIGTERM), (4, SIGTERM)], [(0, SIGTERM), (4, SIGTERM), (5, SIGKILL)]),
    ],
)
def test_signals_and_their_times(asked, expected):
    stopping, sent = Stopping(grace=5), []
    for now in range(21):
        for when, signum in asked:
            if when == now:
                stopping.ask(signum, now)
        sent += [(now, signum) for signum in stopping.due(now)]
    assert sent == expected


def test_without_grace_all_comes_at_once():
    stopping = Stopping(grace=0)
    stopping.begin(SIGTERM, 1)
    assert stopping.due(1) == [SIGTERM, SIGKILL]


HOROVOD = (
    "UnknownError: Horovod has been shut down. This was caused by an exception on one of the ranks",
)


def fate(size, *ends):
    result = Fate(size)
    for at, (rank, code, *more) in enumerate(ends):
        result.add(
            Exit(
                rank,
                100 + rank,
                code,
                float(at),
                "asked" in more,
                HOROVOD if "victim" in more else (),
            )
        )
    return result


@pytest.mark.parametrize(
    "ends, rank, settled",
    [
        ([], None, False),
        ([(0, 0)], None, False),
        ([(1, 3)], 1, True),
        ([(1, 3), (0, 4)], 1, True),
        ([(0, 0), (1, 3)], 1, True),
        ([(0, -15, "asked")], None, False),
        # A peer's error can overtake the rank that caused it.
        ([(0, 1, "victim")], 0, False),
        ([(0, 1, "victim"), (1, 7)], 1, True),
        ([(0, 1, "victim"), (2, 1, "victim"), (1, -9)], 1, True),
        ([(0, 1, "victim"), (1, 1, "victim"), (2, 1, "victim")], 0, True),
        ([(0, 1, "victim"), (1, -15, "asked")], 0, False),
        # Or the rank that left it alone.
        ([(0, 1, "victim"), (1, 0)], 0, True),
    ],
)
def test_who_is_blamed(ends, rank, settled):
    outcome = fate(3, *ends)
    cause = outcome.cause()
    assert (cause.rank if cause else None, outcome.settled()) == (rank, settled)


def test_the_block_names_who_left_early():
    block = fate(2, (1, 0), (0, -11)).block()
    assert "root cause: rank 0 of 2" in block
    assert "signal SIGSEGV (11)" in block
    assert "left early rank 1 (pid 101) with exit code 0 at " in block


def test_exit_codes_as_a_shell_has_them():
    assert Exit(0, 1, 3, 0.0).shell_code == 3
    assert Exit(0, 1, -signal.SIGKILL, 0.0).shell_code == 137
