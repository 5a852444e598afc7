"""Saves and loads the tables of a session alone: without the network, in the middle of training."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.saving import saver
from collective.checkpoint.saving.saver_options import TablesSaver
from collective.ops.graph import graph_state, graphs
from collective.ops.graph.sessions import raw_session
from collective.scope import SCOPES
from collective.tables.table import Table, shard_of


@dataclasses.dataclass
class TableSavers:
    """Keeps the Savers of a graph that save tables alone, by the names of what they save."""

    by_names: dict[tuple[str, ...], TablesSaver] = dataclasses.field(default_factory=dict)


def dump(
    session: Any,
    path: str | os.PathLike[str],
    tables: Collection[str | Table] | None,
    slots: bool,
    global_step: int | None,
) -> str:
    """Saves tables; see `collective.checkpoint.dump_tables`."""
    session = raw_session(session)
    of_tables = _saver(session.graph, tables, slots, "dump_tables")
    with session.graph.as_default(), saver.without_notes():
        saved = of_tables.save(
            session, os.fspath(path), global_step, write_meta_graph=False, write_state=False
        )
    return str(saved)


def load(
    session: Any,
    path: str | os.PathLike[str],
    tables: Collection[str | Table] | None,
    slots: bool,
) -> list[str]:
    """Loads tables; see `collective.checkpoint.load_tables`."""
    session = raw_session(session)
    of_tables = _saver(session.graph, tables, slots, "load_tables")
    with session.graph.as_default(), saver.without_notes():
        of_tables.restore(session, os.fspath(path))
    return sorted(v.op.name for v in of_tables.variables if isinstance(v, Table))


def _saver(
    graph: tf.Graph, tables: Collection[str | Table] | None, slots: bool, caller: str
) -> TablesSaver:
    """Returns the Saver of some tables; it is made once, also in a graph that is final."""
    if not SCOPES.is_open:
        raise RuntimeError(f"checkpoint.{caller} is for sessions inside strategy.scope().")
    variables = _variables(graph, tables, slots, caller)
    savers = graph_state.of(graph, TableSavers).by_names
    names = tuple(sorted(variable.op.name for variable in variables))
    if names not in savers:
        with graphs.open_for_changes(graph), graph.as_default():
            # It keeps no list of its checkpoints, and removes none.
            savers[names] = TablesSaver(variables, max_to_keep=None)
    return savers[names]


def _variables(
    graph: tf.Graph, tables: Collection[str | Table] | None, slots: bool, caller: str
) -> list[Any]:
    """Returns tables of a graph, with their slots.

    Raises:
        ValueError: the graph has no tables, or not one of this name.
    """
    variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    present = {v.op.name: v for v in variables if isinstance(v, Table)}
    wanted = [*present]
    if tables is not None:
        wanted = [t.op.name if isinstance(t, Table) else t for t in tables]
    missing = sorted(set(wanted) - set(present))
    if missing:
        raise ValueError(
            f"checkpoint.{caller}: the graph has no table {missing[0]!r}; its tables are "
            f"{', '.join(sorted(present)) or 'none'}."
        )
    if not wanted:
        raise ValueError(
            f"checkpoint.{caller}: the graph has no tables: make them in strategy.embedding_scope()"
        )
    chosen = {id(present[name]) for name in wanted}
    found = [present[name] for name in dict.fromkeys(wanted)]
    if slots:
        found += [
            v
            for v in variables
            if not isinstance(v, Table) and shard_of(v) is not None and id(shard_of(v)) in chosen
        ]
    return found
