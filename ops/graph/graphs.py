"""Tells how graphs of TensorFlow nest, refuses eager code, and changes graphs that are final."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf


def is_function(graph: tf.Graph) -> bool:
    """Tells whether `graph` is that of a function, or of a branch or loop of version 2."""
    return hasattr(graph, "outer_graph")


def is_eager() -> bool:
    """Tells whether what is written now is executed eagerly, at once or in a function."""
    return bool(tf.executing_eagerly_outside_functions())


def refuse_eager(scope: str, action: str, advice: str = "") -> None:
    """Refuses what works in graphs only, where it is written eagerly.

    Args:
        scope: names what is for graphs.
        action: says what would be done eagerly.
        advice: says what else is different in a graph.

    Raises:
        RuntimeError: no session will run what is written now.
    """
    if is_eager():
        where = "eagerly" if tf.executing_eagerly() else "in a tf.function that is called eagerly"
        raise RuntimeError(
            f"{scope} is for graphs, but {action} {where}. Build the model inside "
            f"`with strategy.scope(), tf.Graph().as_default():`.{advice}"
        )


def outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph around `graph` that a session runs; `graph` itself if nothing is around."""
    while is_function(graph):
        graph = graph.outer_graph
    return graph


def is_outside(graph: tf.Graph) -> bool:
    """Tells whether what is added to `graph` now is part of no branch, loop or function."""
    return not is_function(graph) and graph._get_control_flow_context() is None


# Queue runners run a session in threads of their own, and any run may have to be prepared first.
by_one_thread = threading.RLock()


@contextlib.contextmanager
def open_for_changes(graph: tf.Graph) -> Iterator[None]:
    """Lets `graph` take new operations inside, also if a session has made it final.

    One thread at a time is inside: another would find the graph final when the first one leaves.
    """
    with by_one_thread:
        finalized: Any = graph.finalized
        graph._unsafe_unfinalize()
        try:
            yield
        finally:
            if finalized:
                graph.finalize()
