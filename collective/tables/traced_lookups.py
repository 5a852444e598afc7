"""Writes lookups into the graph of a `tf.function` that eager code calls.

A tape records what happens while a function is traced, and the gradient of an exchange isn't among
it. So a lookup is first a stand-in, of which the tape knows only that it depends on the table:

    ids ──► stand-in ──► identity ──► what the script computes          while it is traced
    ids of all lookups ──► exchange ──► identities                      once they are grouped

Lookups are grouped when gradients are taken, before tables are written, and when the function is
traced to its end: nothing is executed before. `collective.gradients.traced_gradients` takes a
tape's gradients with respect to the identities on to the tables.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective import strategies
from collective.ops.graph import device_scopes, graphs, nested_calls
from collective.scope import SCOPES
from collective.tables.grouping import WrittenLookup, lookups_of, reason_alone
from collective.tables.rows import rows_in_file
from collective.tables.table import Sharded
from collective.tensorflow_internals.graphs import pywrap_tfe, record

IN_GRAPH = "`with strategy.scope(), tf.Graph().as_default():`"


def inside(table: Any, x: Any) -> Any:
    """Returns ids or weights as tensors of the function that is being traced.

    Args:
        table: what is looked up.
        x: a `tf.Tensor` or `tf.SparseTensor`, which a function may have from outside. In a graph
            of TensorFlow 1 it is returned unchanged.

    Raises:
        NotImplementedError: the table is sharded, and is looked up in a branch, a loop or a
            function inside the traced one, or in a dataset's function; or scope() has an option
            that is for graphs.
    """
    graph = tf.get_default_graph()
    if not isinstance(table, Sharded):
        return x
    if graphs.is_of_dataset(graph):
        raise NotImplementedError(
            f"table '{table.op.name}' is looked up in a function of a tf.data.Dataset (map, "
            "filter, a loop over it inside a tf.function). TensorFlow calls it on each rank at "
            "times of its own, so that ranks can't exchange rows there. Let the dataset return the "
            "ids, and look them up in the model; let the loop call the tf.function."
        )
    if not tf.executing_eagerly_outside_functions():
        return x
    refuse_half_precision(f"table '{table.op.name}' is looked up")
    if not graphs.is_traced(graph) and not is_scratch(graph):
        nested_calls.want_inlining(graph)
        where = "in a branch, a loop or a function that is inside a tf.function"
        if not graphs.is_traced(graphs.outermost(graph)):
            where = "in a tf.function that wasn't called inside `with strategy.scope():`"
        advice = (
            "Look it up before the branch or loop (all ids of a tf.map_fn at once), directly in "
            "the tf.function that eager code calls; a loop over Python's range() is none"
        )
        _refuse(table, where, advice)
    return tf.nest.map_structure(tf.identity, x, expand_composites=True)


def refuse_half_precision(action: str) -> None:
    """Refuses an option of scope() that has an effect in sessions only.

    Raises:
        NotImplementedError: scope(mixed_precision=…) is in force.
    """
    precision = SCOPES.options.mixed_precision
    if precision:
        raise NotImplementedError(
            f"scope(mixed_precision='{precision}') is for graphs, but {action} eagerly or in a "
            f"tf.function. Build the model inside {IN_GRAPH}, or leave the option out."
        )


def _refuse(table: Sharded, where: str, advice: str) -> None:
    raise NotImplementedError(
        f"table '{table.op.name}' is looked up {where}. {advice}, or build the model inside "
        f"{IN_GRAPH}."
    )


def is_scratch(graph: tf.Graph) -> bool:
    """Tells whether `graph` is one in which Keras finds out shapes, and which is never executed."""
    return (
        SCOPES.is_open
        and hasattr(graph, "outer_graph")
        and tf.executing_eagerly_outside_functions()
        and not any(map(graphs.is_traced, graphs.since_eager()))
    )


def of_shape(lookup: strategies.Lookup, name: str | None) -> tf.Tensor:
    """Returns a tensor of the type and shape of the result of `lookup`, with no other meaning."""
    table = lookup.table
    shape = tf.TensorShape([None]) if lookup.sparse_ids is not None else lookup.ids.shape
    of_no_id = tf.zeros([0 if n is None else n for n in [*shape, table.dim]], table.dtype)
    later = tf.placeholder_with_default(of_no_id, shape.concatenate([table.dim]))
    return tf.identity(later, name=name)


def stand_in(lookup: strategies.Lookup, name: str | None) -> tf.Tensor:
    """Returns the result of `lookup`, which grouping connects to an exchange.

    Raises:
        NotImplementedError: it can't be grouped.
    """
    table, reason = lookup.table, reason_alone(lookup)
    weights = [] if lookup.sparse_weights is None else [lookup.sparse_weights.values]
    if weights and pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(weights):
        reason = "its weights have a gradient (multiply the rows by them yourself)"
    if reason:
        _refuse(table, f"inside a tf.function, but {reason}", "Change that")
    with record.stop_recording(), device_scopes.anywhere():
        out = of_shape(lookup, name)
    # The gradient function is called where it isn't wanted, too.
    record.record_operation("CollectiveLookup", [out], [table.handle], lambda *_: [None])
    # A dynamic table's rows are found and read by no operation that TensorFlow knows.
    out.graph.watch_variable(table)
    lookups_of(out.graph).add(lookup, out, "")
    rows_in_file.note_use(out.graph, table)
    return out


def lookups_in(graph: tf.Graph) -> list[WrittenLookup]:
    """Returns the lookups of a traced function, in the order in which they were written."""
    return lookups_of(graph).written
