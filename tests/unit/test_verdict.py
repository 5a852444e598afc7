"""What all ranks raise for the headers that they have exchanged."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import pytest
import tensorflow.compat.v1 as tf

from collective.coordination import agreement
from collective.coordination.agreement import (
    CHECK_STRIDE,
    CLOSING,
    ENDED,
    EVALUATING,
    FAILED,
    IDLE,
    INVALID,
    LEFT,
    RUNNING,
    Header,
)
from collective.coordination.prepared_run import peers_are_idle
from collective.errors import RankError

SIGNATURE, OTHER = 17, 18


@dataclasses.dataclass(frozen=True)
class FakeCheck:
    """Says which value of which check is wrong."""

    name: str

    def says(self, place: int, value: int) -> str:
        return f"{self.name}[{place}] is {value}"


CHECKS: list[Any] = [FakeCheck("first"), FakeCheck("second")]


def running(signature: int = SIGNATURE, session: int = 1) -> Header:
    return Header(RUNNING, session, signature)


def no_reports() -> list[dict[str, Any]]:
    raise AssertionError("reports are exchanged though headers agree")


def reports(*names: str) -> Callable[[], list[dict[str, Any]]]:
    """Returns the exchange of reports of ranks that each run one collective."""
    return lambda: [agreement.report(f"runs {name}", ["everywhere", name]) for name in names]


def test_all_run_the_same():
    assert agreement.verdict([running()] * 3, CHECKS, no_reports) is None


@pytest.mark.parametrize(
    "status, state",
    [
        (ENDED, "is out of data"),
        (IDLE, "is out of data"),
        (CLOSING, "is at the end of the session"),
        (LEFT, "has left the session"),
    ],
)
def test_an_end_on_one_rank_ends_the_step_on_all(status: int, state: str):
    header = Header(status, 1, SIGNATURE if status in (ENDED, IDLE) else 0)
    error = agreement.verdict([running(), header, header], CHECKS, no_reports)
    assert isinstance(error, tf.errors.OutOfRangeError)
    assert error.message == f"rank 1, 2 {state}: the step ends on all ranks"


def test_an_evaluation_that_can_not_be_answered_is_an_error_while_others_run():
    ended = Header(ENDED, 1, SIGNATURE, EVALUATING)
    error = agreement.verdict([running(), ended], CHECKS, no_reports)
    assert isinstance(error, RankError) and "Rank 1 is out of data in an evaluation" in str(error)
    together = agreement.verdict([ended, ended], CHECKS, no_reports)
    assert isinstance(together, tf.errors.OutOfRangeError)


def test_an_invalid_id_is_named_with_its_rank():
    invalid = Header(INVALID, 1, SIGNATURE, 1 * CHECK_STRIDE + 5, -3)
    error = agreement.verdict([running(), running(), invalid], CHECKS, no_reports)
    assert isinstance(error, tf.errors.InvalidArgumentError)
    assert error.message == "second[5] is -3 (on rank 2)"


def test_an_invalid_id_comes_before_an_end_of_data():
    headers = [Header(ENDED, 1, SIGNATURE), Header(INVALID, 1, SIGNATURE, 0, 9)]
    error = agreement.verdict(headers, CHECKS, no_reports)
    assert isinstance(error, tf.errors.InvalidArgumentError)


def test_different_runs_are_told_the_first_difference():
    error = agreement.verdict([running(), running(OTHER)], CHECKS, reports("a", "b"))
    assert isinstance(error, RankError)
    assert str(error).startswith("The ranks do not run the same. Rank 0: runs a. Rank 1: runs b.")
    assert "First difference: 'a' is used by rank 0 only." in str(error)


def test_names_that_a_user_knows_are_the_first_difference():
    def exchange() -> list[dict[str, Any]]:
        return [agreement.report("runs", ["collective.a"]), agreement.report("runs", ["z"])]

    error = agreement.verdict([running(), running(OTHER)], CHECKS, exchange)
    assert "First difference: 'z' is used by rank 1 only." in str(error)


def test_runs_of_different_sessions_are_different():
    error = agreement.verdict([running(session=1), running(session=2)], [], reports("a", "a"))
    assert isinstance(error, RankError) and "First difference" not in str(error)


@pytest.mark.parametrize("other", [running(), Header(LEFT, 1), Header(ENDED, 2, OTHER)])
def test_a_failure_comes_before_everything_else(other: Header):
    error = agreement.verdict([other, Header(FAILED, 1)], CHECKS, reports("a", "b"))
    assert isinstance(error, RankError)
    assert str(error) == "A rank failed. Rank 0: runs a. Rank 1: runs b."


def test_ranks_at_the_end_of_a_session_need_no_signature():
    headers = [Header(CLOSING, 1), Header(CLOSING, 1)]
    error = agreement.verdict(headers, CHECKS, no_reports)
    assert isinstance(error, tf.errors.OutOfRangeError)


def test_a_verdict_is_the_same_on_all_ranks_whatever_their_clocks():
    first = agreement.verdict([Header(LEFT, 1, clock=1), running()], CHECKS, no_reports)
    second = agreement.verdict([Header(LEFT, 1, clock=2), running()], CHECKS, no_reports)
    assert str(first) == str(second)


def test_headers_survive_the_way_to_the_peers():
    header = Header(INVALID, 3, 2**62, 5, -(2**63), 7)
    assert agreement.as_headers([list(dataclasses.astuple(header))]) == [header]
    assert len(dataclasses.astuple(header)) == agreement.WIDTH


@pytest.mark.parametrize(
    "others, wait",
    [
        ([Header(IDLE, 1, OTHER)], True),
        ([Header(IDLE, 1, OTHER), running()], True),
        ([running()], False),
        ([Header(IDLE, 1, SIGNATURE)], False),
        ([Header(IDLE, 1, OTHER), Header(ENDED, 1, SIGNATURE)], False),
        ([Header(IDLE, 1, OTHER), running(OTHER)], False),
        ([Header(IDLE, 2, OTHER)], False),
    ],
)
def test_a_run_waits_for_peers_that_still_answer_another_evaluation(
    others: list[Header], wait: bool
):
    assert peers_are_idle([running(), *others], SIGNATURE) == wait


def test_an_end_of_data_where_all_ranks_are_needed_says_so():
    end = tf.errors.OutOfRangeError(None, None, "rank 1 has left the session: the step ends")
    assert str(agreement.needs_all_ranks("saving 'm'", end)).startswith(
        "Saving 'm' takes all ranks, but rank 1 has left the session"
    )
