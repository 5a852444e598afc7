"""Presents a table's gradient by ids, and takes it back as that of the shard.

    gradient of the shard ──► (values, rows of the shard)
                                 │  present
    what a script gets ─────► (values, ids), of the whole table's shape; this rank's part
                                 │  to_shard
    what an optimizer gets ─► (values, rows of the shard)

A script may look the table up by the ids, count them, or leave them alone: then an optimizer is
given the rows of the shard as they were, and no run translates anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import indexed_slices, tensor_conversion_registry

from collective.errors import TableError
from collective.ops import collectives, device_scopes, library_operations, shard_gradients
from collective.ops.graph_state import state_of
from collective.tables import dense_view
from collective.tables.table import Sharded


class TableGradient(tf.IndexedSlices):
    """Holds this rank's part of the gradient of a table: the rows that it owns, by their ids."""


class ShardGradient(tf.IndexedSlices):
    """Holds the gradient of this rank's shard, by the rows of the shard."""


@dataclasses.dataclass(frozen=True)
class GradientRows:
    """Says of which rows of a shard a gradient is.

    Attributes:
        table: the table.
        ids: [K] int64, the ids of its rows.
        rows: [K] int64, where they are in the shard.
        values: [K, D].
        taking: the number of the `tf.gradients` that took it.
    """

    table: Sharded
    ids: tf.Tensor
    rows: tf.Tensor
    values: tf.Tensor
    taking: int


def next_taking(graph: tf.Graph) -> int:
    """Returns the number of the next `tf.gradients` in `graph`."""
    return 1 + max((known.taking for known in state_of(graph).table_gradients.values()), default=0)


def of_rows(values: tf.Tensor, rows: tf.Tensor) -> ShardGradient:
    """Makes the gradient of a shard, each row once."""
    values, rows = shard_gradients.summed(values, rows)
    return ShardGradient(values, shard_gradients.mark_distinct(rows))


def present(gradient: tf.IndexedSlices, table: Sharded, taking: int = 0) -> TableGradient:
    """Returns the gradient of a table as a script is to see it.

    Args:
        gradient: of the shard.
        table: the table.
        taking: the number of the `tf.gradients` that took it, in its graph.
    """
    values, rows = gradient.values, gradient.indices
    with library_operations.noted(rows.graph), device_scopes.anywhere():
        ids = table.ids_of_rows(rows)
        shape = None
        if table.rows is not None:
            shape = tf.constant([table.rows, table.dim], tf.int64, name="shape_of_table")
    known = GradientRows(table, ids, rows, values, taking)
    gradients = state_of(rows.graph).table_gradients
    gradients[ids.name] = gradients[rows.name] = known
    if shard_gradients.is_distinct(rows):
        shard_gradients.mark_distinct(ids)
    return TableGradient(values, ids, shape)


def known_rows(indices: Any) -> GradientRows | None:
    """Returns what is known of a table's gradient by its indices, ids or rows of the shard."""
    if not isinstance(indices, tf.Tensor) or not tf.is_symbolic_tensor(indices):
        return None
    known: GradientRows | None = state_of(indices.graph).table_gradients.get(indices.name)
    return known


def is_of_table(gradient: Any) -> bool:
    """Tells whether `gradient` is a table's, as it was taken or as a script has changed it."""
    return isinstance(gradient, tf.IndexedSlices) and (
        isinstance(gradient, TableGradient) or known_rows(gradient.indices) is not None
    )


def noted_values(values: tf.Tensor, table: Sharded) -> tf.Tensor:
    """Notes that `values` are rows of the gradient of a shard, and returns them."""
    state_of(values.graph).shard_gradients[values.name] = values, table, False
    return values


def to_shard(gradient: Any, table: Sharded) -> Any:
    """Returns a gradient of a table as that of the shard.

    Args:
        gradient: `IndexedSlices` by ids that this rank owns; or the whole table's, [V, D], the same
            on every rank.
        table: the table.
    """
    if gradient is None:
        return None
    with library_operations.noted(tf.get_default_graph()), device_scopes.anywhere():
        if not isinstance(gradient, tf.IndexedSlices):
            if collectives.size() == 1 or table.rows is None:
                return gradient
            own = tf.identity(dense_view.local_rows(table, tf.convert_to_tensor(gradient)))
            return noted_values(own, table)
        known = known_rows(gradient.indices)
        if known is not None and known.table is table:
            return ShardGradient(gradient.values, known.rows)
        rows = table.rows_of_ids(gradient.indices)
        if rows is not gradient.indices:
            state_of(rows.graph).shard_gradients[rows.name] = rows, table, True
        return ShardGradient(gradient.values, rows)


def _to_tensor(
    value: TableGradient, dtype: Any = None, name: str | None = None, as_ref: bool = False
) -> tf.Tensor:
    """Converts a table's gradient to a matrix, [V, D], which is the same on every rank."""
    known = known_rows(value.indices)
    table = None if known is None else known.table
    if value.dense_shape is None:
        called = "a dynamic table" if table is None else f"the dynamic table '{table.op.name}'"
        raise TableError(
            f"The gradient of {called} can't become a matrix: the table has rows for the keys that "
            "came. Keep it as IndexedSlices."
        )
    if table is not None and collectives.size() > 1:
        dense_view.warn_of_size(
            table,
            "table '%s' has a gradient that becomes a matrix, %.1f GB on every rank. Keep it as "
            "IndexedSlices if you can.",
        )
    return indexed_slices._indexed_slices_to_tensor(value, dtype, name, as_ref)


tensor_conversion_registry.register_tensor_conversion_function(
    TableGradient, _to_tensor, priority=10
)
