"""Converts gradients of tables where they enter and leave functions that eager code calls.

    TableGradient ── returned ──► EagerTableGradient ── received ──► TableGradient
      in one function               in eager code                     in another

A function may also return what it has computed of this rank's rows. Eager code gets it of all
ranks' rows, the same on each, as a session that fetches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.reduced_reads import reads_of
from collective.gradients import rank_parts, table_gradients
from collective.gradients.eager_table_gradient import (
    EagerTableGradient,
    is_one,
    refuse_sums,
)
from collective.gradients.part_kinds import BY_ROW
from collective.ops.exchange import shard_gradients
from collective.ops.graph import training_flag
from collective.tables.policies import eager_steps

# In the place of the number of a call of `tf.gradients`, which are from 1.
_RECEIVED = 0


def received(arguments: Any) -> Any:
    """Returns the arguments of a traced function, nested, with gradients of tables as in graphs."""
    return _replaced(arguments, lambda x: _received(x) if is_one(x) else x)


def _received(gradient: EagerTableGradient) -> table_gradients.TableGradient:
    table, rows = gradient.table, gradient._indices
    if table.rows is None:
        # TensorFlow sees no use of a dynamic table where its rows are updated.
        tf.get_default_graph().watch_variable(table)
        if table.last_used is not None:  # Only an update knows the step.
            rows = table.last_used.mark(rows, tf.constant(True))
    rows = shard_gradients.mark_distinct(tf.identity(rows))
    own = table_gradients.ShardGradient(tf.identity(gradient._values), rows)
    return table_gradients.present(own, table, _RECEIVED)


def receives_any(graph: tf.Graph) -> bool:
    """Tells whether a traced function gets a gradient of a table, and with it those of others."""
    of_tables = table_gradients.gradients_of(graph).of_tables
    return any(known.call == _RECEIVED for known in of_tables.values())


def returned(outputs: Any) -> Any:
    """Returns what a traced function returns, nested, as eager code may use it.

    Raises:
        TableError: places among this rank's rows are returned.
        NotImplementedError: eager code couldn't apply what is returned.
    """
    graph = tf.get_default_graph()
    if not table_gradients.gradients_of(graph).of_tables:
        return outputs
    outputs = _replaced(outputs, _returned)
    tensors = [x for leaf in tf.nest.flatten(outputs) for x in _tensors(leaf)]
    for part in map(rank_parts.part_of, tensors):
        if part is not None and part.kind in BY_ROW:
            refuse_sums(part.table)
    rank_parts.gather_fetched(graph, tensors)
    wholes = reads_of(graph).wholes

    def whole(leaf: Any) -> Any:
        if not any(x.name in wholes for x in _tensors(leaf)):
            return leaf
        return tf.nest.map_structure(
            lambda x: wholes.get(x.name, x) if _is_symbolic(x) else x, leaf, expand_composites=True
        )

    return _replaced(outputs, whole)


def _returned(x: Any) -> Any:
    """Returns a gradient of a table as it leaves a function; anything else as it is."""
    known = table_gradients.rows_of(x) if isinstance(x, tf.IndexedSlices) else None
    if known is None:
        return x
    table: Any = known.table
    if table.rows is None:
        graph = tf.get_default_graph()
        if table.policy.draws_keys and eager_steps.of_call(graph).counter is None:
            raise NotImplementedError(
                f"The function '{graph.name}' returns a gradient of table '{table.op.name}', and "
                f"admit_probability={table.policy.admit_probability} in its policy draws keys by "
                "the step to which a lookup leads. Call optimizer.apply_gradients in the function, "
                "too, or leave the option out."
            )
        training_flag.set_always(graph)
    return EagerTableGradient(table, x.values, known.rows)


def _tensors(leaf: Any) -> list[tf.Tensor]:
    """Returns the tensors of an output that isn't the gradient of a table."""
    if is_one(leaf) or isinstance(leaf, tf.Variable):
        return []
    return [x for x in tf.nest.flatten(leaf, expand_composites=True) if _is_symbolic(x)]


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, tf.Tensor) and tf.is_symbolic_tensor(x)


def _replaced(nested: Any, replace: Callable[[Any], Any]) -> Any:
    """Returns a nested structure with other leaves; the same object if no leaf is replaced."""
    leaves = tf.nest.flatten(nested)
    new = [replace(x) for x in leaves]
    if all(was is now for was, now in zip(leaves, new)):
        return nested
    return tf.nest.pack_sequence_as(nested, new)
