"""Replaces the functions by which TensorFlow traces a `tf.function`, and calls it.

Only functions that eager code calls are meant: their calls are what ranks do together. A function
inside another one, or inside a graph of TensorFlow 1, is part of that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.functions import calls, traces
from collective.gradients import function_borders, rank_parts
from collective.interception import graph_passes
from collective.interception.late_patches import LATE
from collective.monitoring import consistency_check
from collective.ops.communication import collectives
from collective.ops.graph import control_flow, graphs, nested_calls
from collective.replication import drifts, eager_states
from collective.scope import SCOPES
from collective.tensorflow_internals.graphs import record

# Whether the function that is traced next is one that a dataset calls.
_for_dataset: list[bool] = [False]


def trace(original: Any, name: str, python_func: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `func_graph.func_graph_from_py_func`: prepares the function's graph for ranks."""
    LATE.apply_present()
    if _for_dataset[-1]:
        return original(name, _of_dataset(python_func), *args, **kwargs)
    if not tf.executing_eagerly():
        return original(name, python_func, *args, **kwargs)

    def traced(*inner: Any, **options: Any) -> Any:
        graph = tf.get_default_graph()
        graphs.note_traced(graph)
        inner, options = function_borders.received((inner, options))
        outputs = function_borders.returned(python_func(*inner, **options))
        graph_passes.prepare_traced(graph)
        traces.note_handles(graph, [inner, options])
        return outputs

    func_graph = original(name, traced, *args, **kwargs)
    traces.close(func_graph)
    are_together = calls.plan_of(func_graph) is not None
    eager_states.note_function(func_graph, together=are_together)
    # A part of a step gets what the ranks have made equal before: gradients of all ranks.
    is_part = calls.is_part_of_step(func_graph) or function_borders.receives_any(func_graph)
    if are_together and collectives.size() > 1 and not is_part:
        drifts.warn_of_drifts(func_graph)
        rank_parts.warn_of_rank_local(func_graph)
    if nested_calls.is_compiled() and _exchanges(func_graph):
        raise NotImplementedError(
            f"The function '{func_graph.name}' is made with jit_compile=True, and looks up tables "
            "or takes gradients of all ranks: XLA compiles no exchange between ranks. Leave "
            "jit_compile out of tf.function."
        )
    return func_graph


def _exchanges(graph: Any) -> bool:
    """Tells whether a function has operations of this library, or collectives."""
    return calls.plan_of(graph) is not None or any(
        op.type.startswith("Collective") for op in graph.get_operations()
    )


def make_for_dataset(
    original: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any
) -> None:
    """Replaces `StructuredFunctionWrapper.__init__`, which traces a function for a dataset.

    TensorFlow calls such a function ahead of time, in threads of its own: it is none that ranks
    carry out together.
    """
    with _tracing(for_dataset=True):
        original(wrapper, *args, **kwargs)


def _of_dataset(python_func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a dataset's function that notes its graph when it is traced."""

    def traced(*inner: Any, **options: Any) -> Any:
        graphs.note_of_dataset(tf.get_default_graph())
        # It may lift something out of its graph, that makes functions of its own.
        with _tracing(for_dataset=False):
            return python_func(*inner, **options)

    return traced


@contextlib.contextmanager
def _tracing(for_dataset: bool) -> Iterator[None]:
    _for_dataset.append(for_dataset)
    try:
        yield
    finally:
        _for_dataset.pop()


def call(original: Any, function: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
    """Replaces `ConcreteFunction._call_flat`: all ranks carry out the call, or none.

    Raises:
        NotImplementedError: another function calls it by its concrete function, or in a branch; or
            a tape outside of it would take its gradient; or it was traced outside of scope(), and
            trains.
        Preempted: it trains or takes data, and the ranks stop.
    """
    plan = calls.plan_of(function.graph)
    if plan is None:
        if not tf.executing_eagerly():
            return original(function, tensor_inputs, captured_inputs)
        if not graphs.is_traced(function.graph):
            traces.check_traced_outside(function.graph)
        with calls.as_step(function.graph):
            return original(function, tensor_inputs, captured_inputs)
    if not tf.executing_eagerly():
        nested_calls.want_inlining(tf.get_default_graph())
        raise NotImplementedError(
            f"The concrete function '{function.graph.name}' is called inside another tf.function, "
            "or in a branch or a loop of one, and ranks agree on calls from eager code only. Call "
            "the tf.function that it is of, directly in the other one, which makes it a part of "
            "that. To export a Keras model (model.export, tf.saved_model.save): "
            "strategy.export_saved_model(folder, model=model)."
        )
    if record.could_possibly_record():
        raise NotImplementedError(
            f"A tf.GradientTape outside of the function '{function.graph.name}' records its call. "
            "Ranks exchange rows and gradients inside it: take the gradients inside the "
            "tf.function, too."
        )
    with calls.as_step(function.graph):
        out = calls.carry_out(plan, lambda: original(function, tensor_inputs, captured_inputs))
    if plan.trains and collectives.size() > 1:
        consistency_check.after_call(plan, SCOPES.options.runs_between_checks)
    return out


def branch(original: Callable[..., Any], decider: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `cond_v2.cond_v2` and `indexed_case`; see `_before_control_flow`."""
    _before_control_flow()
    return control_flow.branch(original, decider, *args, **kwargs)


def loop(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `while_v2.while_loop`; see `_before_control_flow`."""
    _before_control_flow()
    return control_flow.loop(original, *args, **kwargs)


def _before_control_flow() -> None:
    """Groups a traced function's lookups before a branch or loop is made.

    TensorFlow lets operations with side effects wait for those that were made before, and the
    branch may depend on the lookups.
    """
    graph = tf.get_default_graph()
    if graphs.is_traced(graph):
        graph_passes.prepare_traced(graph)
