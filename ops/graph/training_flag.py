"""Flags training runs: only in these do dynamic tables take in new keys."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from collective.ops.graph import device_scopes
from collective.ops.graph.graph_state import state_of
from collective.ops.graph.graphs import outermost


def flag(graph: tf.Graph, always: bool = False) -> tf.Tensor:
    """Returns a bool scalar: True in a run that updates a table or a global variable.

    `collective.coordination.session_runs` feeds it. Each graph that a session runs has one flag,
    shared by the functions and branches in it.

    Args:
        graph: the graph.
        always: whether it is True in every run.
    """
    if always:
        with device_scopes.on_host():
            return tf.constant(True)
    graph = outermost(graph)
    state = state_of(graph)
    if state.training_flag is None:
        with graph.as_default(), tf.init_scope(), device_scopes.on_host():
            state.training_flag = tf.placeholder_with_default(
                tf.constant(False), [], "collective/training"
            )
    return state.training_flag


def existing(graph: tf.Graph) -> tf.Tensor | None:
    """Returns the flag of `graph`; None if nothing has asked for one."""
    return state_of(graph).training_flag
