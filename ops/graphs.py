"""Graphs of TensorFlow: which is around which, what is kept with one, and how one that is final
changes all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable, TypeVar

import tensorflow.compat.v1 as tf

Kept = TypeVar("Kept")


def outermost(graph: tf.Graph) -> tf.Graph:
    """The graph around `graph`, if that is a function's or a branch's: the one that a session runs."""
    while hasattr(graph, "outer_graph"):
        graph = graph.outer_graph
    return graph


def is_outside(graph: tf.Graph) -> bool:
    """Whether what is added to `graph` now is part of no branch, loop or function."""
    return not hasattr(graph, "outer_graph") and graph._get_control_flow_context() is None


def kept(graph: tf.Graph, name: str, make: Callable[[], Kept]) -> Kept:
    """What `graph` has under `name`, made when it is first asked for. On the graph, not in a table
    of ours: they live and die together.
    """
    place = f"_collective_{name}"
    if not hasattr(graph, place):
        setattr(graph, place, make())
    found: Kept = getattr(graph, place)
    return found


def known_alike(graph: tf.Graph) -> set[tf.Operation]:
    """The operations in `graph`, and in functions and branches inside, whose results all ranks have
    alike.
    """
    return kept(outermost(graph), "alike", set)


@contextlib.contextmanager
def open_for_changes(graph: tf.Graph) -> Iterator[None]:
    """Inside, `graph` takes new operations, though a session may have made it final; afterwards it
    is as it was.
    """
    finalized: Any = graph.finalized
    graph._unsafe_unfinalize()
    try:
        yield
    finally:
        if finalized:
            graph.finalize()
