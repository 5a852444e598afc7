"""Tests the outcome of a job: who is blamed, and what the report says."""

from __future__ import annotations

import signal

import pytest

from collective.launch.outcome import JobOutcome, RankExit

HOROVOD = (
    "UnknownError: Horovod has been shut down. This was caused by an exception on one of the ranks",
)


def outcome_of(size, *ends):
    """The outcome of ends (rank, code, "requested" or "victim"), one a second."""
    outcome = JobOutcome(size)
    for second, (rank, code, *marks) in enumerate(ends):
        last_words = HOROVOD if "victim" in marks else ()
        outcome.add(
            RankExit(rank, 100 + rank, code, float(second), "requested" in marks, last_words)
        )
    return outcome


@pytest.mark.parametrize(
    "ends, rank, certain",
    [
        ([], None, False),
        ([(0, 0)], None, False),
        ([(1, 3)], 1, True),
        ([(1, 3), (0, 4)], 1, True),
        ([(0, 0), (1, 3)], 1, True),
        ([(0, -15, "requested")], None, False),
        # A peer's error can overtake the rank that caused it.
        ([(0, 1, "victim")], 0, False),
        ([(0, 1, "victim"), (1, 7)], 1, True),
        ([(0, 1, "victim"), (2, 1, "victim"), (1, -9)], 1, True),
        ([(0, 1, "victim"), (1, 1, "victim"), (2, 1, "victim")], 0, True),
        ([(0, 1, "victim"), (1, -15, "requested")], 0, False),
        # Or the rank that left it alone.
        ([(0, 1, "victim"), (1, 0)], 0, True),
    ],
)
def test_who_is_blamed(ends, rank, certain):
    outcome = outcome_of(3, *ends)
    cause = outcome.root_cause()
    assert (cause.rank if cause else None, outcome.cause_is_certain()) == (rank, certain)


@pytest.mark.parametrize(
    "words, is_victim",
    [
        ("Horovod has been shut down. This was caused by ...", True),
        ("horovod.common.exceptions.HorovodInternalError: ...", True),
        ("[gloo/transport/tcp/pair.cc:598] Connection closed by peer", True),
        ("collective.errors.RankError: A rank failed", True),
        ("collective.errors.RankError: calling model_fn (train) failed on rank 1: KeyError", True),
        ("collective.errors.RankError: the ranks disagree", False),
        ("ValueError: wrong", False),
    ],
)
def test_victims_are_known_by_their_last_words(words, is_victim):
    assert RankExit(0, 1, 1, 0.0, last_words=("first", words, "last")).is_victim == is_victim
    assert not RankExit(0, 1, 0, 0.0, last_words=(words,)).is_victim


@pytest.mark.parametrize(
    "ended, text",
    [
        ([], "ranks 0, 1 and 2"),
        ([1], "ranks 0 and 2"),
        ([1, 0], "rank 2"),
        ([1, 0, 2], "what the ranks left behind"),
    ],
)
def test_the_ranks_that_still_run(ended, text):
    outcome = outcome_of(3, *[(rank, 0) for rank in ended])
    assert (outcome.running_text(), outcome.any_running) == (text, len(ended) < 3)


def test_the_report_names_who_left_early():
    report = outcome_of(2, (1, 0), (0, -11)).failure_report()
    assert "root cause: rank 0 of 2" in report
    assert "signal SIGSEGV (11)" in report
    assert "left early rank 1 (pid 101) with exit code 0 at " in report


def test_the_report_names_who_ended_then():
    report = outcome_of(4, (1, 3), (3, -15, "requested"), (0, 4), (2, -9)).failure_report()
    assert (
        "then ended rank 0 by exit code 4, rank 2 by SIGKILL, "
        "rank 3 by SIGTERM after the launcher's TERM\n"
    ) in report


def test_the_report_shows_twenty_lines_and_shortens_long_ones():
    outcome = JobOutcome(1)
    lines = (*(f"line {number}" for number in range(30)), "x" * 501)
    outcome.add(RankExit(0, 7, 3, 0.0, last_words=lines, last_words_from="stdout"))
    shown = outcome.failure_report().partition("  last lines of its stdout:\n")[2].splitlines()
    assert shown[:-1] == [f"    line {number}" for number in range(11, 30)]
    assert shown[-1] == f"    {'x' * 500}... (501 characters)"


def test_there_is_no_report_without_a_root_cause():
    assert outcome_of(2, (0, 0), (1, -15, "requested")).failure_report() == ""


def test_exit_codes_as_a_shell_has_them():
    assert RankExit(0, 1, 3, 0.0).shell_code == 3
    assert RankExit(0, 1, -signal.SIGKILL, 0.0).shell_code == 137
