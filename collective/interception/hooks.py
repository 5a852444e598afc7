"""Replaces the functions to which a script passes its graph: to take gradients, or to run it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import session_runs, test_mode
from collective.gradients import (
    batch_means,
    eager_gradients,
    loss_scaling,
    rank_parts,
    reduction,
    summed_losses,
)
from collective.interception import graph_passes
from collective.monitoring import run_observer
from collective.ops.counting import counted
from collective.ops.graph import graph_analysis, graphs, seen_operations
from collective.prefetch.prefetcher import runs_keys
from collective.replication import assignments
from collective.scope import SCOPES
from collective.startup import STARTUP
from collective.tables import connections, memory_report
from collective.tables.table import Sharded, in_shard_view
from collective.wrappers import horovod, keras_functions

_NO_START = contextlib.nullcontext()


def take_gradients(
    original: Any, ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `gradients_util._GradientsHelper`, in which every `tf.gradients` ends."""
    xs = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    if tf.executing_eagerly_outside_functions():
        reduction.refuse_eager_gradients(xs)
        return original(ys, xs, grad_ys, *args, **kwargs)
    reduction.refuse_nested(xs)
    summed_losses.warn(ys, xs, grad_ys)
    xs = graph_passes.prepare_gradients(tf.get_default_graph(), ys, xs)
    with STARTUP.doing(tf.get_default_graph(), f"taking {counted(len(xs), 'gradient')}"):
        weighed = batch_means.weighed(ys, xs)
        scale = loss_scaling.scale_of(ys, xs)
        if scale is not None:
            grad_ys = loss_scaling.scaled(scale, ys, grad_ys)

        def take() -> Any:
            with weighed as weighing:
                gradients = original(ys, xs, grad_ys, *args, **kwargs)
            gradients = weighing.settled(gradients)
            return connections.without_others(tf.get_default_graph(), ys, xs, gradients)

        return reduction.reduce_gradients(take, xs, scale=scale)


def take_taped_gradients(
    original: Any,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `tf.GradientTape.gradient`: reduces the gradients."""
    horovod.take_over(tape)
    reduction.refuse_nested(sources)
    if not keras_functions.is_training():  # A loss of `compile` counts by its records.
        summed_losses.warn(target, sources, output_gradients)
    if graphs.is_traced(tf.get_default_graph()):
        eager_gradients.refuse_options("gradients are taken", "in a tf.function")
        graph_passes.prepare_traced(tf.get_default_graph())
    scale = None
    if not graphs.is_eager():
        scale = loss_scaling.scale_of(target, tf.nest.flatten(sources))
    if scale is not None:
        output_gradients = loss_scaling.scaled(
            scale, tf.nest.flatten(target), tf.nest.flatten(output_gradients)
        )
    take = original
    if not tf.executing_eagerly():
        target, output_gradients, weighing = batch_means.taped(target, sources, output_gradients)

        def take(*args: Any, **kwargs: Any) -> Any:
            return weighing.settled(original(*args, **kwargs))

    return reduction.reduce_tape(
        take, tape, target, sources, output_gradients, *args, scale=scale, **kwargs
    )


def assign_table(original: Any, table: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces a table's `assign`, `assign_add` and `assign_sub`.

    A value that is computed from the table's gradient is that of all ranks' rows from now on.
    """
    graph = tf.get_default_graph()
    if not (tf.executing_eagerly() or graphs.is_function(graph) or in_shard_view()):
        rank_parts.settle(graph)
    return assignments.assign_table(original, table, value, *args, **kwargs)


def watch_forward(original: Any, accumulator: Any, primals: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces `ForwardAccumulator.__init__`.

    Raises:
        NotImplementedError: a table is among the primals: lookups carry no tangents of its rows.
    """
    for x in tf.nest.flatten(primals):
        if isinstance(x, Sharded):
            raise NotImplementedError(
                f"tf.autodiff.ForwardAccumulator with respect to the table '{x.op.name}': lookups "
                "have gradients (tf.GradientTape), but carry no tangents. Look the rows up before, "
                "and pass them as the primals."
            )
    original(accumulator, primals, *args, **kwargs)


def run(
    original: Any,
    session: Any,
    fetches: Any,
    feed_dict: Any = None,
    options: Any = None,
    run_metadata: Any = None,
) -> Any:
    """Replaces `Session.run`: prepares the graph, then all ranks run it together."""
    graph, leaves, scope = session.graph, graph_analysis.flatten(fetches), SCOPES.options
    with STARTUP.running(graph) if STARTUP.follows(graph) else _NO_START:
        graph_passes.prepare_run(graph, scope, leaves)
        observer = run_observer.of_options(scope)
        carry_out = functools.partial(
            session_runs.run,
            observer,
            original,
            session,
            fetches,
            leaves,
            feed_dict,
            options,
            run_metadata,
        )
        try:
            if test_mode.is_on():
                return test_mode.run_once(session, leaves, feed_dict, carry_out)
            return carry_out()
        except tf.errors.ResourceExhaustedError as error:
            memory_report.add_table_sizes(error, graph)
            raise


def extend(original: Any, session: Any) -> None:
    """Replaces `Session._extend_graph`: prepares the graph before the session sees it.

    Every run of a session begins with it, including the library's own runs. An operation that the
    session has seen can no longer be changed.
    """
    if runs_keys():
        # The session has seen everything that a run of keys needs. Another thread may be adding to
        # the graph right now.
        return
    graph_passes.prepare_run(session.graph, SCOPES.options)
    original(session)
    seen_operations.note_all(session.graph)
