"""Replicated variables: which they are, and how every rank comes to start with the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import communication, graphs
from collective.tables.table import Table


def mark_shard(variable: Any, table: Table) -> None:
    """From now on `variable` holds one row for each row of `table`'s shard: it is never made equal
    over ranks.
    """
    if variable is not None:
        variable._collective_shard = table


def shard_of(variable: Any) -> Table | None:
    """The table whose shard `variable` is, or has a slot for; None for a replicated variable."""
    table: Table | None = (
        variable if isinstance(variable, Table) else getattr(variable, "_collective_shard", None)
    )
    return table


def is_replicated(variable: Any) -> bool:
    return shard_of(variable) is None


def is_movable(variable: Any) -> bool:
    """Whether its values are numbers, which can be compared and sent."""
    return variable.dtype.base_dtype not in (tf.string, tf.variant, tf.resource)


def make_equal(original: Any, session: Any, variables: Sequence[Any]) -> None:
    """Gives every rank rank 0's values of `variables`. Called on every rank with the same
    variables.
    """
    movable = [v for v in variables if is_movable(v)]
    if not movable:
        return
    cache: dict[Any, list[tf.Operation]] = graphs.kept(session.graph, "broadcasts", dict)
    key = tuple(v.name for v in movable)
    if key not in cache:
        with (
            graphs.open_for_changes(session.graph),
            session.graph.as_default(),
            tf.init_scope(),
            tf.name_scope("collective/make_equal"),
        ):
            cache[key] = [
                tf.assign(
                    v,
                    communication.broadcast(
                        v.read_value(), communication.unique_name(f"{v.op.name}/broadcast")
                    ),
                ).op
                for v in movable
            ]
    original(session, cache[key])
