"""Sends rows that a script names by ids to the ranks that own them.

    ids, rows of each rank ── allgather ── those of all ranks ── each keeps what it owns

A script may make a gradient by itself (`tf.IndexedSlices` of a batch's ids), or compute ids of a
table's gradient (`ids // 2`): only its id tells which rank owns such a row.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.gradients import rank_parts
from collective.gradients.part_kinds import Kind
from collective.gradients.table_gradients import (
    ShardGradient,
    note_rows,
    noted_values,
    of_rows,
    rows_of,
    to_shard,
)
from collective.ops.communication import collectives, gate
from collective.ops.exchange import tensorflow_lookup
from collective.ops.graph import device_scopes, graphs, library_operations
from collective.replication import assignments
from collective.scope import SCOPES
from collective.tables.table import Sharded


def owns(part: rank_parts.Part | None, table: Sharded) -> bool:
    """Tells whether this rank owns the rows of `table` that a part of a gradient names."""
    return part is not None and part.kind is Kind.IDS and part.owners == rank_parts.owners_of(table)


def of_owners(table: Sharded, ids: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns what all ranks pass for the rows of a static table that this rank owns.

    Args:
        table: the table.
        ids: [K] int64, ids of any rank's rows. One outside of the table is an error on all ranks.
        rows: [K, D].

    Returns:
        Ids, int64, and rows. An id may come more than once.
    """
    name = collectives.unique_name(f"{table.op.name}/given_rows")
    gates = gate.gates_of(tf.get_default_graph())
    bounds = tensorflow_lookup.bounds(ids)[None]
    gates.checks.append(gate.Check(name, (str(table.op.name),), (table.rows,), bounds))
    opened = gates.of_collective([ids, rows]).zero
    of_ranks = collectives.allgather(ids, name, opened)
    rows = collectives.allgather(rows, f"{name}.rows", opened)
    is_owned = tf.equal(table.owners(of_ranks), collectives.rank())
    return tf.boolean_mask(of_ranks, is_owned), tf.boolean_mask(rows, is_owned)


def shard_gradient(gradient: Any, table: Sharded) -> Any:
    """Converts the gradient that a script passes to an optimizer for a table to that of the shard.

    A gradient that a script has made itself is treated like TensorFlow's: as the mean over ranks,
    or the sum with `scope(embedding_gradients='sum')`.

    Raises:
        TableError: only the script knows to which rows it belongs.
    """
    if gradient is None or collectives.size() == 1:
        return to_shard(gradient, table)
    if not isinstance(gradient, tf.IndexedSlices):
        if table.rows is not None:
            gradient = assignments.mean_matrix(gradient, table)
        return to_shard(gradient, table)
    known = rows_of(gradient)
    if known is not None and known.table is table:
        return to_shard(gradient, table)
    part = rank_parts.part_of(gradient.indices)
    if owns(part, table):
        return to_shard(gradient, table)
    if part is not None and part.kind not in (Kind.IDS, Kind.ROWS):
        raise TableError(
            f"The indices '{gradient.indices.op.name}' of a gradient of table '{table.op.name}' "
            "are places among the rows of this rank. Give ids."
        )
    if table.rows is None:
        raise TableError(
            f"A gradient of the dynamic table '{table.op.name}' has indices "
            f"('{gradient.indices.op.name}') that are not those of its own gradient: the table may "
            "have no rows for these keys. Give the gradient that tf.gradients takes of a lookup of "
            "them."
        )
    return _given(gradient, table, part)


def _given(gradient: tf.IndexedSlices, table: Sharded, part: Any) -> ShardGradient:
    graph = tf.get_default_graph()
    if not graphs.is_outside(graph):
        raise TableError(
            f"A gradient of table '{table.op.name}' with indices of a script's own "
            f"('{gradient.indices.op.name}') is not supported in tf.cond, tf.while_loop or a "
            "function: apply it outside."
        )
    with library_operations.noted(graph), device_scopes.anywhere():
        values = tf.reshape(gradient.values, [-1, table.dim])
        if part is None and SCOPES.options.embedding_gradients == "mean":
            values = values / tf.cast(collectives.size(), values.dtype)
        ids = tf.reshape(tf.cast(gradient.indices, tf.int64), [-1])
        ids, values = of_owners(table, ids, values)
        made = of_rows(values, table.rows_of_ids(ids))
        note_rows(made.indices, table)
        noted_values(made.values, table)
        return made
