"""Tells whether gradients wait for an update of several batches, which numbers rows."""

from __future__ import annotations

from typing import Any

from collective.errors import TableError
from collective.ops.graph.graph_state import state_of
from collective.ops.graph.sessions import run_unpatched


def any_in(session: Any) -> bool:
    """Tells whether `session` keeps gradients for a later run."""
    kept = state_of(session.graph).kept_batches
    return bool(kept) and any(run_unpatched(session, kept))


def check_none(table: Any, session: Any) -> None:
    """Raises TableError if rows of `table` can't be removed, as gradients wait in `session`."""
    if any_in(session):
        raise TableError(
            f"Rows of table '{table.op.name}' can not be removed now: gradients of some batches "
            "wait for the update of scope(local_steps=…), which is of rows where they are. "
            "Remove rows after the run that updates."
        )
