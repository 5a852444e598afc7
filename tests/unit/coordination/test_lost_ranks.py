"""The error of a rank that waits for one that has ended says why that may be."""

import pytest
import tensorflow as tf

from collective.coordination import agreement, coordinator

LOST = "lost rank 1, which has ended, while '{}' waited for it in shared memory"


@pytest.mark.parametrize("name", ["collective.agreement", "collective.agreement.ahead"])
def test_a_rank_that_makes_fewer_calls(name):
    error = tf.errors.UnknownError(None, None, LOST.format(name))
    explained = agreement.explained(error)
    assert type(explained) is tf.errors.UnknownError
    assert explained.message == f"{error.message}\n{agreement.LOST_EARLY}."
    assert "as many batches" in explained.message and "rank 0 writes" in explained.message
    assert agreement.explained(explained) is explained


@pytest.mark.parametrize("message", [LOST.format("collective.group1.rows"), "something else"])
def test_other_errors_stay_what_they_are(message):
    error = tf.errors.UnknownError(None, None, message)
    assert agreement.explained(error) is error


def test_calls_and_meetings_explain(monkeypatch):
    """By what fails in a run or a call, and by the exchange outside of any."""
    monkeypatch.setattr(coordinator.carrier_choice, "give_up", lambda: None)
    error = tf.errors.UnknownError(None, None, LOST.format(agreement.NAME))
    assert agreement.LOST_EARLY in coordinator.failure_half_way(error).message
