"""Knows which operations of a graph a session has seen: TensorFlow lets nothing change these."""

from __future__ import annotations

import dataclasses

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_state


@dataclasses.dataclass
class SeenOperations:
    """Records what sessions have seen of a graph.

    Attributes:
        last: the highest number of an operation that one has seen; 0 if none has run the graph.
    """

    last: int = 0


def last(graph: tf.Graph) -> int:
    """Returns the highest number of an operation of `graph` that a session has seen; 0 for none."""
    return graph_state.of(graph, SeenOperations).last


def note_all(graph: tf.Graph) -> None:
    """Notes that a session is about to see everything that `graph` has now."""
    # TensorFlow numbers operations from 2.
    graph_state.of(graph, SeenOperations).last = graph.version + 1
