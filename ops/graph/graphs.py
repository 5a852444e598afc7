"""Describes how TensorFlow's graphs nest, refuses eager code, and changes final graphs.

A `tf.function` that eager code calls has a graph that no other one is around. It is run as a whole
by each call, as a session runs its graph: it is called *traced* here, and isn't counted among the
graphs of functions, which are part of a graph that is run.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.tensorflow_internals.graphs import context, record

_traced: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
_of_datasets: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def note_traced(graph: tf.Graph) -> None:
    """Notes that `graph` is that of a `tf.function` which eager code calls."""
    _traced.add(graph)


def is_traced(graph: tf.Graph) -> bool:
    """Tells whether `graph` is that of a `tf.function` which eager code calls in scope()."""
    return hasattr(graph, "outer_graph") and graph in _traced


def note_of_dataset(graph: tf.Graph) -> None:
    """Notes that `graph` is that of a function which a `tf.data.Dataset` calls (map, filter, …).

    TensorFlow calls it in threads of its own, when it wants the next records.
    """
    _of_datasets.add(graph)


def is_of_dataset(graph: tf.Graph) -> bool:
    """Tells whether `graph` is that of a dataset's function, or inside one."""
    return outermost(graph) in _of_datasets


def is_function(graph: tf.Graph) -> bool:
    """Tells whether `graph` belongs to a function, or to a branch or loop of version 2.

    That is, to a part of the graph that is run.
    """
    return hasattr(graph, "outer_graph") and graph not in _traced


def is_eager() -> bool:
    """Tells whether operations written now belong to no graph that ranks run together.

    They are executed at once, or in a `tf.function` that was traced outside of scope().
    """
    if not tf.executing_eagerly_outside_functions():
        return False
    return tf.executing_eagerly() or not is_traced(outermost(tf.get_default_graph()))


def is_recorded() -> bool:
    """Tells whether a `tf.GradientTape` may record what is executed, or traced, now."""
    return bool(record.could_possibly_record())


def since_eager() -> list[tf.Graph]:
    """Returns the graphs that this thread builds inside each other, the innermost one first.

    Those end at eager code: what is built in `tf.init_scope()` is inside nothing around that, even
    if TensorFlow has it for a new graph's `outer_graph`.
    """
    switches = context.context().context_switches.stack
    inner = itertools.takewhile(lambda switch: switch.is_building_function, reversed(switches))
    return [switch.enter_context_fn.__self__ for switch in inner]


def refuse_eager(scope: str, action: str, advice: str = "") -> None:
    """Refuses, in eager code, something that works only in graphs.

    Args:
        scope: names what is for graphs only.
        action: says what would be done eagerly.
        advice: says what else is different in a graph.

    Raises:
        RuntimeError: the code is eager, so that no session will run it.
    """
    if tf.executing_eagerly_outside_functions():
        where = "eagerly" if tf.executing_eagerly() else "in a tf.function that is called eagerly"
        raise RuntimeError(
            f"{scope} is for graphs, but {action} {where}. Build the model inside "
            f"`with strategy.scope(), tf.Graph().as_default():`.{advice}"
        )


def outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph around `graph` that a session, a call or a dataset runs; maybe itself."""
    while is_function(graph) and graph not in _of_datasets:
        graph = graph.outer_graph
    return graph


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Adds what is made inside to the outermost graph, outside of branches and dependences.

    It is `tf.init_scope()`, which however leaves the graph of a traced function.
    """
    graph = outermost(tf.get_default_graph())
    if not is_traced(graph):
        with tf.init_scope():
            yield
        return
    inside = contextlib.nullcontext() if graph is tf.get_default_graph() else graph.as_default()
    with inside, record.stop_recording(), tf.control_dependencies(None):
        yield


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
