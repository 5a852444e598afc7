"""Evicts rows after calls of functions that train, as `monitoring.eviction_schedule` after runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.policy import EverySteps
from collective.tables.dynamic_table import DynamicTable
from collective.tables.policies import eager_steps, eviction


def after_training(graph: tf.Graph) -> None:
    """Evicts what is due after a call of a traced function that trains, on this rank.

    Every rank calls it, after the same calls.
    """
    call = eager_steps.of_call(graph)
    if not call.tables:
        return
    by_steps = [
        table
        for table in eager_steps.tables_of(call.counter)
        if isinstance(table.policy.evict, EverySteps)
    ]
    due = [table for table in by_steps if _is_due(table)]
    if due:
        eviction.evict(None, due)
    bounded = [table for table in call.tables if table.policy.capacity is not None]
    for table in eviction.too_full(None, bounded):
        eviction.limit(None, [table], before=eager_steps.trained(table))
    note_moves([*due, *bounded])  # On this rank no row may have moved.


def at_save(tables: Sequence[DynamicTable]) -> None:
    """Evicts what is due before a checkpoint of tables of eager code, on this rank.

    Every rank calls it.
    """
    eviction.at_save(None, tables)
    note_moves(tables)


def begin_again(tables: Sequence[DynamicTable]) -> None:
    """Notes that tables and the steps of their optimizer were restored."""
    note_moves(tables)
    for table in tables:
        table.evicted_at = eager_steps.trained(table)


def note_moves(tables: Sequence[DynamicTable]) -> None:
    """Notes that rows of tables of eager code may be in other places now, on some rank."""
    for table in tables:
        table.moves += 1


def _is_due(table: DynamicTable) -> bool:
    """Tells whether a multiple of a table's steps has been reached since it was last asked."""
    evict: Any = table.policy.evict
    every, step = evict.steps, eager_steps.trained(table)
    last = table.evicted_at
    if step < last:  # An earlier checkpoint was restored.
        last = max(step - 1, 0)
    table.evicted_at = step
    return bool(step // every > last // every)
