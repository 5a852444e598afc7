"""Lets every rank start with the same values of replicated variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.graph import graph_state, graphs
from collective.tables.table import is_movable


@dataclasses.dataclass
class Broadcasts:
    """Records the assignments of rank 0's values in a graph, by the variables' names."""

    by_names: dict[tuple[str, ...], list[tf.Operation]] = dataclasses.field(default_factory=dict)


def broadcast_initial_values(original: Any, session: Any, variables: Sequence[Any]) -> None:
    """Gives every rank rank 0's values of `variables`.

    Every rank calls it with the same variables. Variables that don't hold numbers are left
    unchanged.

    Args:
        original: TensorFlow's `Session.run`.
        session: the session.
        variables: replicated variables of its graph.
    """
    movable = [v for v in variables if is_movable(v)]
    if not movable:
        return
    broadcasts = graph_state.of(session.graph, Broadcasts).by_names
    key = tuple(v.name for v in movable)
    if key not in broadcasts:
        broadcasts[key] = _broadcasts(session.graph, movable)
    original(session, broadcasts[key])


def _broadcasts(graph: tf.Graph, variables: Sequence[Any]) -> list[tf.Operation]:
    assigns = []
    with (
        graphs.open_for_changes(graph),
        graph.as_default(),
        tf.init_scope(),
        tf.name_scope("collective/make_equal"),
    ):
        for variable in variables:
            value, name = variable.read_value(), f"{variable.op.name}/broadcast"
            of_rank_0 = collectives.broadcast(value, collectives.unique_name(name))
            assigns.append(tf.assign(variable, of_rank_0).op)
    return assigns
