"""Tells how graphs of TensorFlow nest, and changes those that are final."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf


def is_function(graph: tf.Graph) -> bool:
    """Tells whether `graph` is that of a function, or of a branch or loop of version 2."""
    return hasattr(graph, "outer_graph")


def outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph around `graph` that a session runs; `graph` itself if nothing is around."""
    while is_function(graph):
        graph = graph.outer_graph
    return graph


def is_outside(graph: tf.Graph) -> bool:
    """Tells whether what is added to `graph` now is part of no branch, loop or function."""
    return not is_function(graph) and graph._get_control_flow_context() is None


@contextlib.contextmanager
def open_for_changes(graph: tf.Graph) -> Iterator[None]:
    """Lets `graph` take new operations inside, also if a session has made it final."""
    finalized: Any = graph.finalized
    graph._unsafe_unfinalize()
    try:
        yield
    finally:
        if finalized:
            graph.finalize()
