"""Evicts rows between saves: what is too much behind every step, the rest every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.session_state import state_of_session
from collective.ops.graph_state import state_of
from collective.policy import EverySteps
from collective.tables import eviction, waiting_gradients
from collective.tables.dynamic_table import DynamicTable
from collective.tables.last_use import global_step


def behind(session: Any, carry_out: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `carry_out`, which carries out a training run of `session`, with evictions behind it.

    They are a part of the step, whose time is measured.
    """
    if not state_of(session.graph).evicting_tables:
        return carry_out

    def carry_out_and_evict(*args: Any) -> Any:
        out = carry_out(*args)
        after_training(session)
        return out

    return carry_out_and_evict


def after_training(session: Any) -> None:
    """Evicts what is due behind a training run of `session`, on this rank.

    Every rank calls it, behind the same runs.
    """
    tables = state_of(session.graph).evicting_tables
    if not tables or tf.train.get_global_step(session.graph) is None:
        return
    if waiting_gradients.any_in(session):
        return
    _every_so_many_steps(session, [t for t in tables if isinstance(t.policy.evict, EverySteps)])
    full = eviction.too_full(session, tables)
    if full:
        eviction.limit(session, full, before=global_step(session))


def _every_so_many_steps(session: Any, tables: Sequence[DynamicTable]) -> None:
    """Evicts rows of tables for which a multiple of their steps has been reached.

    Nothing is read as long as none can have been: a run counts at most one global step.
    """
    if not tables:
        return
    state = state_of_session(session)
    state.runs_to_eviction -= 1
    if state.runs_to_eviction > 0:
        return
    step = global_step(session)
    last = state.eviction_step
    state.eviction_step = step
    state.runs_to_eviction = min(_every(table) - step % _every(table) for table in tables)
    if last is None or step < last:
        # It is not known whether one was due: the session has been restored, or initialized anew.
        last = step - 1
    due = [table for table in tables if step // _every(table) > last // _every(table)]
    if due:
        eviction.evict(session, due)


def _every(table: DynamicTable) -> int:
    evict: Any = table.policy.evict
    return int(evict.steps)
