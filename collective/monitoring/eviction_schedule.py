"""Evicts rows between saves: excess rows after every step, the rest every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.session_state import state_of_session
from collective.policy import EverySteps
from collective.tables.dynamic_table import DynamicTable
from collective.tables.policies import eviction, next_step
from collective.tables.policies.last_use import global_step
from collective.tables.rows import waiting_gradients


def with_eviction(session: Any, carry_out: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `carry_out`, which carries out a training run of `session`, and evicts afterwards.

    They are a part of the step, whose time is measured.
    """
    if not next_step.evicting_tables(session.graph):
        return carry_out

    def carry_out_and_evict(*args: Any) -> Any:
        before_training(session)
        out = carry_out(*args)
        after_training(session)
        return out

    return carry_out_and_evict


def before_training(session: Any) -> None:
    """Takes note of the step at which a session begins, or goes on: what follows it is due."""
    state = state_of_session(session)
    if state.eviction_step is None and _evicted_by_steps(session):
        state.eviction_step = global_step(session)


def after_training(session: Any) -> None:
    """Evicts what is due after a training run of `session`, on this rank.

    Every rank calls it, after the same runs.
    """
    tables = next_step.evicting_tables(session.graph)
    if not tables or tf.train.get_global_step(session.graph) is None:
        return
    state_of_session(session).runs_to_eviction -= 1
    if waiting_gradients.any_in(session):
        return
    _every_so_many_steps(session, _evicted_by_steps(session))
    full = eviction.too_full(session, tables)
    if full:
        eviction.limit(session, full, before=global_step(session))


def _evicted_by_steps(session: Any) -> list[DynamicTable]:
    tables = next_step.evicting_tables(session.graph)
    return [table for table in tables if isinstance(table.policy.evict, EverySteps)]


def _every_so_many_steps(session: Any, tables: Sequence[DynamicTable]) -> None:
    """Evicts rows of tables for which a multiple of their steps has been reached.

    Nothing is read as long as none can have been, by the most steps that a run counts. Where that
    isn't known, the step is read after every run.
    """
    if not tables:
        return
    state, version = state_of_session(session), session.graph.version
    if state.eviction_graph_version != version:  # Runs may count more from now on.
        state.eviction_graph_version, state.runs_to_eviction = version, 0
        state.steps_of_run = next_step.most_counted(session.graph)
    if state.runs_to_eviction > 0:
        return
    step, last = global_step(session), state.eviction_step
    state.eviction_step = step
    steps_to_eviction = min(_every(table) - step % _every(table) for table in tables)
    steps_of_run = steps_to_eviction if state.steps_of_run is None else state.steps_of_run
    state.runs_to_eviction = -(-steps_to_eviction // max(steps_of_run, 1))
    if last is None or step < last:  # The session has been initialized again.
        last = max(step - 1, 0)
    due = [table for table in tables if step // _every(table) > last // _every(table)]
    if due:
        eviction.evict(session, due)


def _every(table: DynamicTable) -> int:
    evict: Any = table.policy.evict
    return int(evict.steps)
