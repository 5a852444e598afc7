"""Takes gradients of tables by a `tf.GradientTape` while a `tf.function` is traced.

A tape knows the identities that lookups return (`collective.tables.traced_lookups`). From there on
the gradients are those of the exchange, as in any graph:

    loss ── tape ──► identities of the lookups ── tf.gradients of their groups ──► shards
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.graph import device_scopes, library_operations
from collective.ops.graph.graphs import outside
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
        NotImplementedError: zeros are asked for, and a table is among `xs`: plain TensorFlow's
            would be of all its rows.
    """
    del output_gradients
    tables = [x for x in xs if isinstance(x, Sharded)]
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
    others = [x for x in xs if id(x) not in tables]
    # One rank reads a whole table (for a regularizer, say) from the variable itself.
    read = list(tables.values()) if collectives.size() == 1 else []
    taken = by_tape([*others, *read, *(written.out.outputs[0] for written in lookups)])
    of_others, of_tables = iter(taken[: len(others)]), taken[len(others) :][: len(read)]
    of_rows = taken[len(others) + len(read) :]
    if any(gradient is not None for gradient in of_rows) and not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
        name = lookups[0].lookup.table.op.name
        raise NotImplementedError(
            f"The gradient of the table '{name}' is taken while a tf.GradientTape records, which "
            "doesn't see the exchange of gradients. Take it after the tape's `with` block, and "
            "inside no other tape's."
        )
    by_table: dict[int, list[Any]] = {
        id(table): [gradient] for table, gradient in zip(read, of_tables) if gradient is not None
    }
    for key in dict.fromkeys(id(written.group) for written in lookups):
        members = [
            (written, gradient)
            for written, gradient in zip(lookups, of_rows)
            if id(written.group) == key and gradient is not None
        ]
        if members:
            for table, slices in _of_group(members):
                by_table.setdefault(id(table), []).append(slices)
    return [_sum(by_table.get(id(x), [])) if id(x) in tables else next(of_others) for x in xs]


def _of_group(members: Sequence[tuple[Any, Any]]) -> list[tuple[Sharded, tf.IndexedSlices]]:
    """Returns the gradients of the shards of a group's tables.

    Args:
        members: lookups of one group, and the gradients of their results.
    """
    graph = tf.get_default_graph()
    tables = {id(written.lookup.table): written.lookup.table for written, _ in members}
    with outside(), library_operations.noted(graph), device_scopes.anywhere():
        gradients = tf.gradients(
            [written.out.inputs[0] for written, _ in members],
            [graph.capture(table.handle) for table in tables.values()],
            [tf.convert_to_tensor(gradient) for _, gradient in members],
        )
    return list(zip(tables.values(), gradients))


def _sum(gradients: Sequence[Any]) -> Any:
    """Returns the gradient of a shard that is looked up in several groups, or also read whole."""
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    slices = [
        each
        if isinstance(each, tf.IndexedSlices)
        else tf.IndexedSlices(each, tf.range(tf.shape(each, out_type=tf.int64)[0]), tf.shape(each))
        for each in gradients
    ]
    return tf.IndexedSlices(
        tf.concat([each.values for each in slices], 0),
        tf.concat([each.indices for each in slices], 0),
        slices[-1].dense_shape,
    )
