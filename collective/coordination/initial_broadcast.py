"""Replicated variables: which they are, and how every rank comes to start with the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import collectives, graphs
from collective.ops.graph_state import state_of
from collective.tables.table import is_movable


def make_equal(original: Any, session: Any, variables: Sequence[Any]) -> None:
    """Gives every rank rank 0's values of `variables`. Called on every rank with the same
    variables.
    """
    movable = [v for v in variables if is_movable(v)]
    if not movable:
        return
    cache = state_of(session.graph).broadcasts
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
                    collectives.broadcast(
                        v.read_value(), collectives.unique_name(f"{v.op.name}/broadcast")
                    ),
                ).op
                for v in movable
            ]
    original(session, cache[key])
