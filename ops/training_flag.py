"""Whether a run trains: only then do dynamic tables take in new keys."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from collective.ops.graph_state import state_of
from collective.ops.graphs import outermost


def flag(graph: tf.Graph) -> tf.Tensor:
    """Bool scalar: True in a run that updates a table or a global variable (see
    `collective.coordination.session_runs`), else False.

    One for each graph that a session runs, the same for the functions and branches in it.
    """
    graph = outermost(graph)
    state = state_of(graph)
    if state.training_flag is None:
        with graph.as_default(), tf.init_scope(), tf.device("/cpu:0"):
            state.training_flag = tf.placeholder_with_default(
                tf.constant(False), [], "collective/training"
            )
    return state.training_flag


def existing(graph: tf.Graph) -> tf.Tensor | None:
    """The flag of `graph`, if anything asked for it."""
    return state_of(graph).training_flag
