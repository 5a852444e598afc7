"""Lets collectives run in branches and loops: one iteration at a time, if all ranks reach them.

TensorFlow lets iterations that don't depend on each other run at the same time (10 in
`tf.while_loop` and `tf.map_fn`). A collective of one iteration would then meet the peers'
collective of another iteration, or meet itself under the same name.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis
from collective.ops.graph.graphs import is_function
from collective.tensorflow_internals.graphs import attr_value_pb2

# The deciders of the branches of version 2 that are being built, None for a loop; and what stands
# for the outermost loop.
_building = threading.local()


def one_at_a_time() -> None:
    """Makes the loops of version 1 around a collective run one iteration at a time.

    It is called when the collective is made, while the loops are still being built.
    """
    graph = tf.get_default_graph()
    in_loops_one_at_a_time(graph, graph._get_control_flow_context())


def in_loops_one_at_a_time(graph: tf.Graph, context: Any) -> None:
    """Makes loops of version 1, in `context` and around it, run one iteration at a time.

    No session of `graph` may have seen them yet.
    """
    while context is not None:
        if context.IsWhileContext() and context.parallel_iterations > 1:
            context._parallel_iterations = 1
            frame = context.name.encode()
            for op in graph.get_operations():
                if op.type in ("Enter", "RefEnter") and op.get_attr("frame_name") == frame:
                    op._set_attr("parallel_iterations", attr_value_pb2.AttrValue(i=1))
        context = context.outer_context


def build_while_op(
    original: Callable[..., Any],
    loop_vars: Any,
    cond_graph: Any,
    body_graph: Any,
    output_shapes: Any,
    parallel_iterations: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes loops of version 2 that contain collectives run one iteration at a time.

    It replaces `while_v2._build_while_op`, which also builds the loops' gradients.
    """
    if any(
        graph_analysis.is_collective(op.type)
        or op.type in graph_analysis.CALLS
        and graph_analysis.has_inside(body_graph, op, graph_analysis.is_collective)
        for op in body_graph.get_operations()
    ):
        parallel_iterations = 1
    return original(
        loop_vars, cond_graph, body_graph, output_shapes, parallel_iterations, *args, **kwargs
    )


def branch(original: Callable[..., Any], decider: Any, *args: Any, **kwargs: Any) -> Any:
    """Notes what branches depend on while they are built: their graphs don't tell.

    It replaces `cond_v2.cond_v2` and `indexed_case`.
    """
    return _within(decider, original, decider, *args, **kwargs)


def loop(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Notes that a loop is being built; replaces `while_v2.while_loop`."""
    around = getattr(_building, "loop", None)
    _building.loop = around or object()
    try:
        return _within(None, original, *args, **kwargs)
    finally:
        _building.loop = around


def _within(decider: Any, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    around = getattr(_building, "deciders", ())
    _building.deciders = (*around, decider)
    try:
        return build(*args, **kwargs)
    finally:
        _building.deciders = around


def outermost_loop() -> object | None:
    """Returns what stands for the outermost loop around operations that are made now, or None."""
    found: object | None = getattr(_building, "loop", None)
    graph: Any = tf.get_default_graph()
    while found is None and graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            found = context if context.IsWhileContext() else found
            context = context.outer_context
        graph = graph.outer_graph if is_function(graph) else None
    return found


def deciders() -> list[Any]:
    """Returns what decides whether, or how often, operations that are made now run.

    These are the predicates and indices of the branches around them, and None for a loop or a
    function (which may be called anywhere, and several times at once).
    """
    result = list(getattr(_building, "deciders", ()))
    inner, depth = tf.get_default_graph(), 0
    while is_function(inner):
        inner = inner.outer_graph
        depth += 1
    result += [None] * (depth > len(result))
    context = tf.get_default_graph()._get_control_flow_context()
    while context is not None:
        result.append(None if context.IsWhileContext() else getattr(context, "pred", None))
        context = context.outer_context
    return result
