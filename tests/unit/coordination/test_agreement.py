"""Tests what ranks conclude from each other's headers: a pure function of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.coordination import branch_choices
from collective.ops.communication.gate import Check
from tests.unit.rank_threads import RankError, agreement, prepared_run

RUNNING, INVALID, ENDED = agreement.RUNNING, agreement.INVALID, agreement.ENDED
LEFT, FAILED, IDLE, CLOSING = agreement.LEFT, agreement.FAILED, agreement.IDLE, agreement.CLOSING
A, B = 11, 22  # signatures


def header(status, signature=A, session=1, **more):
    return agreement.Header(status, session, signature, **more)


def verdict(*headers, reports=None, shared=()):
    """Returns the error for headers of ranks 0, 1, …; `reports` are exchanged if given."""
    checks = [
        Check("collective.users.keys", ("users",), (10,), None),
        Check("collective.group.keys", ("items", "shops"), (5, 7), None),
    ]

    def exchange():
        assert reports is not None, "reports are exchanged on every rank or on none"
        return reports

    return agreement.verdict(headers, checks, exchange, shared=shared)


def doing(*whats):
    return [agreement.report(what, []) for what in whats]


def test_ranks_that_run_the_same_go_on():
    assert verdict(header(RUNNING), header(RUNNING)) is None
    assert verdict(header(RUNNING)) is None


def test_ranks_that_take_other_branches_are_told_which():
    choices = [branch_choices.Choice(name, ()) for name in ("one", "two", "three")]
    shared = branch_choices.descriptions(choices)
    reports = [agreement.report("runs train", shared)] * 3
    headers = [header(RUNNING, id=bits) for bits in (5, 5, 6)]
    error = verdict(*headers, reports=reports, shared=shared)
    assert isinstance(error, RankError)
    assert "they differ at 'one', 'two', in which" in str(error) and "Rank 2: runs train" in str(
        error
    )


def test_the_end_of_data_comes_before_a_choice_of_branches():
    error = verdict(header(RUNNING, id=1), header(RUNNING, id=0), header(ENDED))
    assert isinstance(error, tf.errors.OutOfRangeError)


@pytest.mark.parametrize(
    "status, words",
    [
        (ENDED, "rank 1 is out of data"),
        (IDLE, "rank 1 is out of data"),
        (CLOSING, "rank 1 is at the end of the session"),
        (LEFT, "rank 1 has left the session"),
    ],
)
def test_the_step_ends_on_all_ranks_where_it_ends_on_one(status, words):
    signature = A if status in (ENDED, IDLE) else 0
    error = verdict(header(RUNNING), header(status, signature), header(RUNNING))
    assert isinstance(error, tf.errors.OutOfRangeError)
    assert f"{words}: the step ends on all ranks" in error.message


def test_all_ranks_that_end_are_named():
    error = verdict(header(ENDED), header(RUNNING), header(ENDED))
    assert "rank 0, 2 is out of data" in error.message


def test_who_is_out_of_data_comes_before_who_has_left():
    error = verdict(header(LEFT, 0), header(ENDED))
    assert "rank 1 is out of data" in error.message


@pytest.mark.parametrize(
    "check, place, number, words",
    [(0, 0, 99, "users"), (1, 0, 6, "items"), (1, 1, -3, "shops")],
)
def test_an_invalid_id_is_an_error_that_names_the_table(check, place, number, words):
    invalid = header(INVALID, check=check * agreement.CHECK_STRIDE + place, id=number)
    error = verdict(header(RUNNING), invalid)
    assert isinstance(error, tf.errors.InvalidArgumentError)
    assert words in error.message and str(number) in error.message
    assert error.message.endswith("(on rank 1)")


def test_an_invalid_id_comes_before_an_end_of_data():
    error = verdict(header(ENDED), header(INVALID, id=99))
    assert isinstance(error, tf.errors.InvalidArgumentError)


@pytest.mark.parametrize("other", [header(RUNNING, B), header(RUNNING, A, session=2)])
def test_ranks_that_run_something_else(other):
    error = verdict(header(RUNNING), other, reports=doing("runs train", "runs loss"))
    assert isinstance(error, RankError)
    assert "Rank 0: runs train. Rank 1: runs loss." in str(error)


def test_the_first_difference_is_one_that_a_user_knows_by_its_name():
    told = doing("runs a", "runs a", "runs a")
    for report in told:
        report["shared"] = ["collective.group.keys"]
    told[0]["shared"] += ["collective.a.keys", "lookup of users"]
    told[2]["shared"] += ["lookup of users"]
    error = verdict(header(RUNNING), header(RUNNING, B), header(RUNNING), reports=told)
    assert "First difference: 'lookup of users' is used by rank 0, 2 only." in str(error)


LOOKUPS = ["table 'a', sum", "table 'b', sum", "table 'c', sum"]


def numbered(order, form="lookup {:03} of group1: {}"):
    return sorted(form.format(i, LOOKUPS[k]) for i, k in enumerate(order))


@pytest.mark.parametrize("form", ["lookup {:03} of group1: {}", "collective.t_{}.keys: {}"])
def test_the_same_lookups_in_another_order(form):
    told = doing("runs a", "runs a", "runs a")
    for report, order in zip(told, [(0, 1, 2), (0, 2, 1), (0, 1, 2)]):
        report["shared"] = ["collective.gradients.1", *numbered(order, form)]
    told[1]["shared"][0] = "collective.gradients.2"  # of variables in that order
    error = verdict(header(RUNNING), header(RUNNING, B), header(RUNNING), reports=told)
    told_order = (
        "All ranks have the same lookups, in a different order: first comes \"table 'b', sum\" on "
        "rank 0, 2, \"table 'c', sum\" on rank 1."
    )
    assert told_order in str(error) and "sorted(" in str(error) and "set" in str(error)


@pytest.mark.parametrize("other", [["table 'a', sum"], [*LOOKUPS[:2], "table 'd', sum"]])
def test_other_lookups_are_no_other_order(other):
    told = doing("runs a", "runs a")
    told[0]["shared"] = numbered((0, 1, 2))
    told[1]["shared"] = [f"lookup {i:03} of group1: {what}" for i, what in enumerate(other)]
    error = verdict(header(RUNNING), header(RUNNING, B), reports=told)
    assert "First difference" in str(error) and "order:" not in str(error)


def test_a_signature_of_a_rank_that_runs_nothing_is_not_compared():
    for status in (CLOSING, LEFT):
        assert isinstance(verdict(header(RUNNING), header(status, 0)), tf.errors.OutOfRangeError)


def test_a_failure_comes_before_all_else():
    error = verdict(
        header(RUNNING, B),
        header(FAILED, 0, session=3),
        header(ENDED),
        reports=doing("runs a", "failed with ValueError: boom", "runs b"),
    )
    assert isinstance(error, RankError)
    assert str(error).startswith("A rank failed. Rank 0: runs a. Rank 1: failed with ValueError")


def test_an_evaluation_in_which_a_rank_can_not_answer():
    ended = header(ENDED, check=agreement.EVALUATING)
    error = verdict(header(RUNNING), ended)
    assert isinstance(error, RankError) and "Rank 1 is out of data in an evaluation" in str(error)
    assert isinstance(verdict(ended, ended), tf.errors.OutOfRangeError), "all have come to its end"


def test_headers_travel_as_rows_of_integers():
    headers = [header(RUNNING), header(INVALID, check=2, id=-(2**63))]
    rows = np.array([dataclasses.astuple(one) for one in headers], np.int64)
    assert rows.shape == (2, agreement.WIDTH)
    assert agreement.as_headers(rows) == headers


@pytest.mark.parametrize(
    "headers, found",
    [
        ([header(RUNNING, A), header(IDLE, B)], True),
        ([header(RUNNING, A), header(IDLE, A)], False),  # it is what this rank runs
        ([header(RUNNING, A), header(RUNNING, A)], False),
        ([header(RUNNING, A), header(RUNNING, B), header(IDLE, B)], False),
        ([header(RUNNING, A), header(IDLE, B, session=2)], False),
        ([header(RUNNING, A), header(ENDED, A), header(IDLE, B)], False),
        ([header(IDLE, B), header(IDLE, B)], False),
    ],
)
def test_peers_that_answer_an_earlier_evaluation(headers, found):
    assert prepared_run.peers_are_idle(headers, A) is found
