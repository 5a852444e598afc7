"""Evicts rows of dynamic tables whose policy says so.

save ──► rows whose last use is long ago, or whose weights are small ──► removed, slots and all
step ──► more rows than allowed ──► the least recently used rows ──► removed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops import kernel_device
from collective.ops.communication import collectives
from collective.ops.graph import graphs
from collective.policy import TablePolicy
from collective.tables.dynamic_table import DynamicTable
from collective.tables.policies import eager_steps, next_step
from collective.tables.policies.last_use import DeviceLastUse, LastUse, step_of
from collective.tables.rows import row_columns
from collective.tables.rows.row_store import Store, local_counts

BLOCK = 1 << 14  # Rows of a file that are read at once.


def prepare(table: DynamicTable, collections: Sequence[str] | None) -> None:
    """Makes what the policy of a new table needs in addition to its rows.

    Raises:
        TableError: the table was made eagerly, in a GPU's memory, and uses of its rows are needed.
    """
    policy = table.policy
    if not evicts(policy):
        return
    if policy.steps_to_live is not None or policy.capacity is not None:
        if table.is_eager and table.bridge is not None:
            name = "capacity" if policy.steps_to_live is None else "steps_to_live"
            raise TableError(
                f"Table '{table.op.name}' has {name}={getattr(policy, name)} in its policy, but it "
                "is made eagerly, and in the GPU's memory, where only sessions note when rows were "
                f"used. Set {kernel_device.DYNAMIC}=host, build the model in a graph, or leave the "
                "option out."
            )
        kind = LastUse if table.bridge is None else DeviceLastUse
        table.last_used = kind(table, collections)
    if table.is_eager:
        eager_steps.register(table)
    else:
        next_step.evicting_tables(graphs.outermost(tf.get_default_graph())).append(table)


def evicts(policy: TablePolicy) -> bool:
    options = policy.steps_to_live, policy.l2_weight_threshold, policy.capacity
    return any(option is not None for option in options)


def at_save(session: Any, tables: Sequence[DynamicTable]) -> dict[str, int]:
    """Removes this rank's rows that the policies of `tables` don't keep, before a save.

    Args:
        session: the session; None for tables that were made eagerly, here and below.
        tables: the tables.

    Returns:
        How many of each table, by its name.
    """
    evicted = evict(session, tables)
    # A rank that is out of data has no steps of its own after which its tables were limited.
    for table in too_full(session, tables):
        limited = limit(session, [table], step_of(session, table))
        evicted[table.op.name] += limited[table.op.name]
    return evicted


def evict(session: Any, tables: Sequence[DynamicTable]) -> dict[str, int]:
    """Removes this rank's rows that are too old or too small for the policies of `tables`.

    Call it between two steps.

    Returns:
        How many of each table, by its name.
    """
    evicted = {}
    for table, count in _counts(session, tables):
        store, policy = table.store(session), table.policy
        # It may bring rows from the file: places of rows are looked at after it.
        used = None if policy.steps_to_live is None else table.last_used.used(session)
        by_option, all_keys = {}, store.all_keys()
        is_small = np.zeros(count, bool)
        if policy.l2_weight_threshold is not None:
            is_small = _are_small(store, policy.l2_weight_threshold)
            small = np.flatnonzero(is_small)
            by_option["l2_weight_threshold"] = all_keys[small], store.places(small)
        if policy.steps_to_live is not None and used is not None:
            is_old = (used <= step_of(session, table) - policy.steps_to_live) & ~is_small
            spared = _share(table, policy.keep_at_least or 0) - int(
                np.count_nonzero(~(is_old | is_small))
            )
            old = _all_but_latest(is_old, spared, used, all_keys)
            by_option["steps_to_live"] = all_keys[old], store.places(old)
        evicted[table.op.name] = _remove(session, table, by_option)
    return evicted


def limit(
    session: Any, tables: Sequence[DynamicTable], before: int | None = None
) -> dict[str, int]:
    """Removes this rank's rows in excess of what the policies of `tables` allow.

    Args:
        session: the session, between two steps.
        tables: tables with a capacity.
        before: rows that were used in the run that led to this step, or later, aren't removed.
            None: any row can be removed.

    Returns:
        How many of each table, by its name.
    """
    evicted = {}
    for table in tables:
        store, column = table.store(session), table.last_used.column(session)
        excess = len(store) - _share(table, table.policy.capacity or 0)
        keys = places = np.empty(0, np.int64)
        if excess > 0:
            latest = np.iinfo(np.int64).max if before is None else before
            keys, places = store.oldest.take(store, column, excess, latest)
        evicted[table.op.name] = _remove(session, table, {"capacity": (keys, places)})
    return evicted


def too_full(session: Any, tables: Sequence[DynamicTable]) -> list[DynamicTable]:
    """Returns those of `tables` that have more rows on this rank than their policies allow."""
    bounded = [table for table in tables if table.policy.capacity is not None]
    if not bounded:
        return []
    return [
        table
        for table, count in _counts(session, bounded)
        if count > _share(table, table.policy.capacity or 0)
    ]


def _counts(session: Any, tables: Sequence[DynamicTable]) -> list[tuple[DynamicTable, int]]:
    """Returns those of `tables` that are initialized in `session`, each with its rows here."""
    if session is None:
        return [(table, table.local_count()) for table in tables]
    try:
        return list(zip(tables, local_counts(session, tables)))
    except tf.errors.FailedPreconditionError:
        if len(tables) == 1:
            return []
        return [pair for table in tables for pair in _counts(session, [table])]


def _share(table: DynamicTable, rows: int) -> int:
    """Returns this rank's share of a total number of rows of a table."""
    return table.placement.share(collectives.rank(), rows)


def _remove(
    session: Any, table: DynamicTable, by_option: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> int:
    """Removes rows.

    Args:
        session: the session.
        table: the table.
        by_option: [K] int64 keys and their places (`Store.locate`), by the option that evicts them;
            each key once.

    Returns:
        How many.
    """
    store = table.store(session)
    nothing = np.empty(0, np.int64)
    keys = np.concatenate([nothing, *(keys for keys, _ in by_option.values())])
    places = np.concatenate([nothing, *(places for _, places in by_option.values())])
    if len(keys):
        store.tally.evict(store, {option: keys for option, (keys, _) in by_option.items()})
        store.remove_at(keys, places, table.columns_of_slots(session))
    return len(keys)


def _all_but_latest(
    is_old: np.ndarray, spared: int, used: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """Returns the positions of old rows, except for the most recently used ones.

    Args:
        is_old: [R] bool.
        spared: how many of these; below 1 for none.
        used: [R] the steps of the last uses.
        keys: [R], by which rows of the same step are ordered.
    """
    old = np.flatnonzero(is_old)
    if spared > 0:
        order = np.lexsort((keys[old], used[old]))
        old = old[order[: max(0, len(old) - spared)]]
    return old


def _are_small(store: Store, threshold: float) -> np.ndarray:
    """Tells for each row w of `store`, in the order of its keys, whether ½‖w‖² is below a
    threshold.

    Rows in a file are read there.
    """
    values: Any = store.values
    are_small = [values.is_small(store.count_in_memory, threshold)]
    for keys in store.keys_in_file(BLOCK):
        rows = store.read([values], keys, store.locate(keys))[0]
        are_small.append(row_columns.is_small(rows, threshold, np))
    return np.concatenate(are_small)
