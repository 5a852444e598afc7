"""Describes how TensorFlow's graphs nest, refuses eager code, and changes final graphs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf


def is_function(graph: tf.Graph) -> bool:
    """Tells whether `graph` belongs to a function, or to a branch or loop of version 2."""
    return hasattr(graph, "outer_graph")


def is_eager() -> bool:
    """Tells whether operations written now are executed eagerly, at once or in a function."""
    return bool(tf.executing_eagerly_outside_functions())


def refuse_eager(scope: str, action: str, advice: str = "") -> None:
    """Refuses, in eager code, something that works only in graphs.

    Args:
        scope: names what is for graphs only.
        action: says what would be done eagerly.
        advice: says what else is different in a graph.

    Raises:
        RuntimeError: the code is eager, so that no session will run it.
    """
    if is_eager():
        where = "eagerly" if tf.executing_eagerly() else "in a tf.function that is called eagerly"
        raise RuntimeError(
            f"{scope} is for graphs, but {action} {where}. Build the model inside "
            f"`with strategy.scope(), tf.Graph().as_default():`.{advice}"
        )


def outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph around `graph` that a session runs; `graph` itself if there is none."""
    while is_function(graph):
        graph = graph.outer_graph
    return graph


def is_outside(graph: tf.Graph) -> bool:
    """Tells whether operations added to `graph` now are outside of any branch, loop or function."""
    return not is_function(graph) and graph._get_control_flow_context() is None


# Queue runners run a session in separate threads, and any run may have to be prepared first.
by_one_thread = threading.RLock()


@contextlib.contextmanager
def open_for_changes(graph: tf.Graph) -> Iterator[None]:
    """Inside, lets `graph` take new operations even if a session has made it final.

    Only one thread at a time is inside: another would find the graph final when the first leaves.
    """
    with by_one_thread:
        finalized: Any = graph.finalized
        graph._unsafe_unfinalize()
        try:
            yield
        finally:
            if finalized:
                graph.finalize()
