"""Tells whether gradients wait for an update of several batches, which numbers rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops.graph import graph_state
from collective.ops.graph.sessions import run_unpatched


@dataclasses.dataclass
class KeptBatches:
    """Records how many batches' gradients the sessions of a graph keep for a later run.

    These gradients know rows by their numbers.

    Attributes:
        counts: int64 scalars.
    """

    counts: list[tf.Tensor] = dataclasses.field(default_factory=list)


def note(graph: tf.Graph, count: tf.Tensor) -> None:
    """Notes that the sessions of `graph` keep the gradients of `count` batches."""
    graph_state.of(graph, KeptBatches).counts.append(count)


def any_in(session: Any) -> bool:
    """Tells whether `session` keeps gradients for a later run."""
    kept = graph_state.of(session.graph, KeptBatches).counts
    return bool(kept) and any(run_unpatched(session, kept))


def check_none(table: Any, session: Any) -> None:
    """Raises TableError if rows of `table` can't be removed, as gradients wait in `session`."""
    if session is not None and any_in(session):
        raise TableError(
            f"Rows of table '{table.op.name}' can not be removed now: gradients of some batches "
            "wait for the update of scope(local_steps=…), which is of rows where they are. "
            "Remove rows after the run that updates."
        )
