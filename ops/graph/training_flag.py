"""Flags training runs: only in these do dynamic tables take in new keys."""

from __future__ import annotations

import dataclasses

import tensorflow.compat.v1 as tf

from collective.ops.graph import device_scopes, graph_state
from collective.ops.graph.graphs import outermost, outside


@dataclasses.dataclass
class TrainingFlag:
    """Records the flag of a graph.

    Attributes:
        tensor: bool scalar, True in runs that update something; None if nothing has asked for it.
        is_always: whether it is True in each call of a function, which updates nothing itself.
    """

    tensor: tf.Tensor | None = None
    is_always: bool = False


def flag(graph: tf.Graph, always: bool = False) -> tf.Tensor:
    """Returns a bool scalar: True in a run that updates a table or a global variable.

    `collective.coordination.session_runs` feeds it. Each graph that a session runs has one flag,
    shared by the functions and branches in it. So has a function that eager code calls, which sets
    it when it is traced to its end.

    Args:
        graph: the graph.
        always: whether it is True in every run.
    """
    if always:
        with device_scopes.on_host():
            return tf.constant(True)
    graph = outermost(graph)
    record = graph_state.of(graph, TrainingFlag)
    if record.tensor is None:
        with graph.as_default(), outside(), device_scopes.on_host():
            record.tensor = tf.placeholder_with_default(
                tf.constant(False), [], "collective/training"
            )
    return record.tensor


def set_in_function(graph: tf.Graph, trains: bool) -> None:
    """Sets the flag of a function that eager code calls, if anything has asked for it."""
    record = graph_state.of(graph, TrainingFlag)
    if record.tensor is not None:
        with graph.as_default(), outside(), device_scopes.on_host():
            record.tensor.op._update_input(0, tf.constant(trains or record.is_always))


def set_always(graph: tf.Graph) -> None:
    """Notes that a function is a part of training without updating anything itself."""
    graph_state.of(graph, TrainingFlag).is_always = True
