"""Shows a table's gradient by ids, and converts it back to that of the shard.

    gradient of the shard ──► (values, rows of the shard)
                                 │  present
    what a script gets ─────► (values, ids), of the whole table's shape; this rank's part
                                 │  to_shard
    what an optimizer gets ─► (values, rows of the shard)

A script may look up the table by the ids, or count them. If it doesn't use them, an optimizer gets
the original rows of the shard, and no run translates anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops.communication import collectives
from collective.ops.exchange import shard_gradients
from collective.ops.graph import device_scopes, graph_state, library_operations
from collective.tables import dense_view
from collective.tables.table import Sharded
from collective.tensorflow_internals.graphs import indexed_slices, tensor_conversion_registry


class TableGradient(tf.IndexedSlices):
    """Holds this rank's part of the gradient of a table: the rows that it owns, by their ids.

    The operations that compute the ids are made only when the ids are used.

    Args:
        values: [K, D].
        rows: says to which rows they belong.
        dense_shape: [2] int64, that of the table; None of a dynamic one.
    """

    def __init__(self, values: tf.Tensor, rows: GradientRows, dense_shape: tf.Tensor | None):
        self.rows = rows
        super().__init__(values, None, dense_shape)

    @property
    def _indices(self) -> tf.Tensor:
        return self.rows.ids

    @_indices.setter
    def _indices(self, none: None) -> None:
        """Leaves it to `rows`."""


class ShardGradient(tf.IndexedSlices):
    """Holds the gradient of this rank's shard, by the rows of the shard."""


class GradientRows:
    """Says to which rows of a shard a gradient belongs.

    Attributes:
        table: the table.
        rows: [K] int64, where they are in the shard.
        values: [K, D], the gradient as it was taken.
        call: the number of the call of `tf.gradients` that took it.
    """

    def __init__(self, table: Sharded, rows: tf.Tensor, values: tf.Tensor, call: int):
        self.table, self.rows, self.values, self.call = table, rows, values, call
        self._ids: tf.Tensor | None = None

    @property
    def made_ids(self) -> tf.Tensor | None:
        """Returns `ids` if they are used."""
        return self._ids

    @property
    def ids(self) -> tf.Tensor:
        """Returns the ids of the rows, int64 [K]."""
        if self._ids is None:
            self._ids = self._make_ids()
            gradients_of(self._ids.graph).of_tables[self._ids.name] = self
            if shard_gradients.is_distinct(self.rows):
                shard_gradients.mark_distinct(self._ids)
        return self._ids

    def _make_ids(self) -> tf.Tensor:
        graph = self.rows.graph
        is_inside = self.rows.op._get_control_flow_context() is not None
        with (
            graph.as_default(),
            # What asks may wait for something, or be in a branch; others may ask elsewhere.
            contextlib.nullcontext() if is_inside else tf.control_dependencies(None),
            library_operations.noted(graph),
            device_scopes.anywhere(),
        ):
            # Where one rank has all rows, their ids are the rows; they are known by their tensor.
            return tf.identity(self.table.ids_of_rows(self.rows))


class ShardPart(NamedTuple):
    """Stands for what an optimizer gets in the place of a script's gradient of a table.

    Attributes:
        tensor: values [K, D] or rows [K] of the shard.
        table: the table.
        is_rows: whether it is the rows.
    """

    tensor: tf.Tensor
    table: Sharded
    is_rows: bool


@dataclasses.dataclass
class TableGradients:
    """Records the gradients of tables in a graph.

    Attributes:
        of_tables: those that scripts get, by the names of their indices.
        of_shards: what optimizers get instead of those of scripts, by the tensors' names.
    """

    of_tables: dict[str, GradientRows] = dataclasses.field(default_factory=dict)
    of_shards: dict[str, ShardPart] = dataclasses.field(default_factory=dict)


def gradients_of(graph: tf.Graph) -> TableGradients:
    """Returns the record of `graph`."""
    return graph_state.of(graph, TableGradients)


def next_call(graph: tf.Graph) -> int:
    """Returns the number of the next `tf.gradients` in `graph`."""
    of_tables = gradients_of(graph).of_tables.values()
    return 1 + max((known.call for known in of_tables), default=0)


def of_rows(values: tf.Tensor, rows: tf.Tensor) -> ShardGradient:
    """Makes the gradient of a shard, each row once."""
    values, rows = shard_gradients.summed(values, rows)
    return ShardGradient(values, shard_gradients.mark_distinct(rows))


def present(gradient: tf.IndexedSlices, table: Sharded, call: int = 0) -> TableGradient:
    """Returns the gradient of a table in the form that a script sees.

    Args:
        gradient: of the shard.
        table: the table.
        call: the number of the call of `tf.gradients` that took it, in its graph.
    """
    values, rows = gradient.values, gradient.indices
    known = GradientRows(table, rows, values, call)
    gradients_of(rows.graph).of_tables[rows.name] = known
    shape = None
    if table.rows is not None:
        with library_operations.noted(rows.graph), device_scopes.anywhere():
            shape = tf.constant([table.rows, table.dim], tf.int64, name="shape_of_table")
    return TableGradient(values, known, shape)


def rows_of(gradient: tf.IndexedSlices) -> GradientRows | None:
    """Returns the rows of a gradient, if it is a table's with its original indices."""
    return gradient.rows if isinstance(gradient, TableGradient) else known_rows(gradient.indices)


def with_values(gradient: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    """Returns a gradient with other values for the same rows."""
    if isinstance(gradient, TableGradient):
        return TableGradient(values, gradient.rows, gradient.dense_shape)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def distinct(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns a gradient with each row once; a table's original gradient already has."""
    if isinstance(gradient, TableGradient) and shard_gradients.is_distinct(gradient.rows.rows):
        return gradient
    return tf.IndexedSlices(
        *shard_gradients.summed(gradient.values, gradient.indices), gradient.dense_shape
    )


def known_rows(indices: Any) -> GradientRows | None:
    """Returns what is known of a table's gradient by its indices, ids or rows of the shard."""
    if not isinstance(indices, tf.Tensor) or not tf.is_symbolic_tensor(indices):
        return None
    return gradients_of(indices.graph).of_tables.get(indices.name)


def is_of_table(gradient: Any) -> bool:
    """Tells whether `gradient` is a table's, as it was taken or as a script has changed it."""
    return isinstance(gradient, tf.IndexedSlices) and (
        isinstance(gradient, TableGradient) or known_rows(gradient.indices) is not None
    )


def noted_values(values: tf.Tensor, table: Sharded) -> tf.Tensor:
    """Notes that `values` are rows of the gradient of a shard, and returns them."""
    gradients_of(values.graph).of_shards[values.name] = ShardPart(values, table, False)
    return values


def note_rows(rows: tf.Tensor, table: Sharded) -> None:
    """Notes that `rows` are the rows of a gradient of a shard."""
    gradients_of(rows.graph).of_shards[rows.name] = ShardPart(rows, table, True)


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
        known = rows_of(gradient)
        if known is not None and known.table is table:
            return ShardGradient(gradient.values, known.rows)
        rows = table.rows_of_ids(gradient.indices)
        if rows is not gradient.indices:
            note_rows(rows, table)
        return ShardGradient(gradient.values, rows)


def _to_tensor(
    value: TableGradient, dtype: Any = None, name: str | None = None, as_ref: bool = False
) -> tf.Tensor:
    """Converts a table's gradient to a matrix, [V, D], which is the same on every rank."""
    table = value.rows.table
    if value.dense_shape is None:
        raise TableError(
            f"The gradient of the dynamic table '{table.op.name}' can't become a matrix: the table "
            "has rows for the keys that came. Keep it as IndexedSlices."
        )
    if collectives.size() > 1:
        dense_view.warn_of_size(
            table,
            "table '%s' has a gradient that becomes a matrix, %.1f GB on every rank. Keep it as "
            "IndexedSlices if you can.",
        )
    return indexed_slices._indexed_slices_to_tensor(value, dtype, name, as_ref)


tensor_conversion_registry.register_tensor_conversion_function(
    TableGradient, _to_tensor, priority=10
)
