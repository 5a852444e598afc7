"""Takes gradients of tables by a `tf.GradientTape` while a `tf.function` is traced.

A tape knows the identities that lookups return (`collective.tables.traced_lookups`), and those of
`tf.nn.l2_loss` of a table. From there on the gradients are those of the exchange, as in any graph:

    loss ── tape ──► identities of the lookups ── tf.gradients of their groups ──► shards
                 └─► identities of l2_loss ── tf.gradients of each ──► shards
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.graph import device_scopes, graph_state, graphs, library_operations
from collective.tables import dense_view
from collective.tables.table import Sharded
from collective.tables.traced_lookups import lookups_in
from collective.tensorflow_internals.graphs import pywrap_tfe


def check(
    xs: Sequence[Any],
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> None:
    """Checks the arguments of `tf.GradientTape.gradient` with respect to `xs`.

    Raises:
        NotImplementedError: a table is among `xs`, and ranks would have to exchange its gradient in
            a loop or a branch; or zeros are asked for: plain TensorFlow's would be of all its rows.
    """
    del output_gradients
    tables = [x for x in xs if isinstance(x, Sharded)]
    if tables and collectives.size() > 1 and graphs.is_function(tf.get_default_graph()):
        raise NotImplementedError(
            f"The gradient of the table '{tables[0].op.name}' is taken in a loop, a branch or a "
            "function that is inside a tf.function, where ranks can't exchange it. Take it "
            "directly in the tf.function that eager code calls, with the tape's `with` block "
            "around the loop."
        )
    if tables and tf.UnconnectedGradients(unconnected_gradients) != tf.UnconnectedGradients.NONE:
        raise NotImplementedError(
            f"tape.gradient(…, unconnected_gradients='zero') with respect to the table "
            f"'{tables[0].op.name}': leave the argument out. The gradient of a table that isn't "
            "looked up is None then, as optimizers take it."
        )


def take(by_tape: Callable[[list[Any]], Sequence[Any]], xs: Sequence[Any]) -> list[Any]:
    """Returns this rank's gradients with respect to `xs`; those of tables are of their shards.

    All lookups of the function so far are grouped already.

    Args:
        by_tape: takes the gradients with respect to variables and tensors; it can be called once.
        xs: variables, tables, tensors.

    Raises:
        NotImplementedError: another tape records, which would miss the exchange.
    """
    graph = tf.get_default_graph()
    tables = {id(x): x for x in xs if isinstance(x, Sharded)}
    lookups = [
        written
        for written in lookups_in(graph)
        if id(written.lookup.table) in tables and written.group is not None
    ]
    squares = [
        (table, out)
        for table, out in graph_state.of(graph, dense_view.Squares).made
        if id(table) in tables
    ]
    others = [x for x in xs if id(x) not in tables]
    # One rank reads a whole table (for a regularizer, say) from the variable itself.
    read = list(tables.values()) if collectives.size() == 1 else []
    outs = [*(written.out for written in lookups), *(out for _, out in squares)]
    taken = by_tape([*others, *read, *(out.outputs[0] for out in outs)])
    of_others, of_tables = iter(taken[: len(others)]), taken[len(others) :][: len(read)]
    of_outs = taken[len(others) + len(read) :]
    if any(gradient is not None for gradient in of_outs) and not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
        name = next(iter(tables.values())).op.name
        raise NotImplementedError(
            f"The gradient of the table '{name}' is taken while a tf.GradientTape records, which "
            "doesn't see the exchange of gradients. Take it after the tape's `with` block, and "
            "inside no other tape's."
        )
    by_table: dict[int, list[Any]] = {
        id(table): [gradient] for table, gradient in zip(read, of_tables) if gradient is not None
    }
    # Of each group of lookups, and of each l2_loss: its tables, identities and their gradients.
    parts: dict[int, list[tuple[Any, tf.Operation, Any]]] = {}
    for written, gradient in zip(lookups, of_outs):
        parts.setdefault(id(written.group), []).append(
            (written.lookup.table, written.out, gradient)
        )
    for (table, out), gradient in zip(squares, of_outs[len(lookups) :]):
        parts[id(out)] = [(table, out, gradient)]
    for members in parts.values():
        members = [member for member in members if member[2] is not None]
        if members:
            for table, slices in _of_shards(members):
                by_table.setdefault(id(table), []).append(slices)
    return [_sum(by_table.get(id(x), [])) if id(x) in tables else next(of_others) for x in xs]


def _of_shards(members: Sequence[tuple[Any, tf.Operation, Any]]) -> list[tuple[Sharded, Any]]:
    """Returns the gradients of the shards of tables that are exchanged together.

    Args:
        members: each a table, an identity of what is computed of it, and that one's gradient.
    """
    graph = tf.get_default_graph()
    tables = {id(table): table for table, _, _ in members}
    with graphs.outside(), library_operations.noted(graph), device_scopes.anywhere():
        gradients = tf.gradients(
            [out.inputs[0] for _, out, _ in members],
            [graph.capture(table.handle) for table in tables.values()],
            [tf.convert_to_tensor(gradient) for _, _, gradient in members],
        )
    return list(zip(tables.values(), gradients))


def _sum(gradients: Sequence[Any]) -> Any:
    """Returns the gradient of a shard that is looked up in several groups, or also read whole."""
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    slices = [each for each in gradients if isinstance(each, tf.IndexedSlices)]
    of_all_rows = [each for each in gradients if not isinstance(each, tf.IndexedSlices)]
    if of_all_rows:
        total = tf.add_n(of_all_rows)
        for each in slices:
            total = tf.tensor_scatter_nd_add(total, each.indices[:, None], each.values)
        return total
    return tf.IndexedSlices(
        tf.concat([each.values for each in slices], 0),
        tf.concat([each.indices for each in slices], 0),
        slices[-1].dense_shape,
    )
