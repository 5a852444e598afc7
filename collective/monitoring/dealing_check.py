"""Lets ranks compare the input that is dealt to them, during training and at the end.

Each rank deals from the whole input, and must see the same elements in the same order
(`collective.data.dealt_input`). They are compared after training runs 1, 2, 4, 8, … of a session,
so there is no extra exchange per step: a million steps have twenty. Data that end are compared by
what ranks exchange at that point anyway (`collective.coordination.dealt_input`), and by an
Estimator at the end of its session.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.coordination.session_state import state_of_session
from collective.data.dealt_input import DealtInput, input_of
from collective.monitoring import input_check
from collective.ops.communication import collectives


def after_training(session: Any) -> None:
    """Counts a training run, and compares after some of them; every rank calls it.

    Raises:
        RankError: the ranks deal from other elements, or in another order; on every rank.
    """
    dealt = input_of(session.graph)
    if dealt is None or collectives.size() == 1:
        return
    state = state_of_session(session)
    state.dealt_runs += 1
    is_due = state.dealt_runs & (state.dealt_runs - 1) == 0
    if is_due and input_check.check_of(session.graph).all_deal:
        _compare(session, dealt)


class DealingHook(tf.train.SessionRunHook):
    """Compares what was dealt in a session when it ends, on all ranks."""

    def end(self, session: tf.Session) -> None:
        dealt = input_of(session.graph)
        if dealt is not None and collectives.size() > 1:
            _compare(session, dealt)


def _compare(session: Any, dealt: DealtInput) -> None:
    reports = barrier.exchange(
        session, "compares what is dealt to the ranks", {"dealt": dealt.report(session)}
    )
    error = dealt.judge([report["dealt"] for report in reports])
    if error is not None:
        raise error
