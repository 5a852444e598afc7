"""Changes single rows of tables by their ids: `tf.scatter_update` and its like.

Every rank passes the same ids and rows, and changes those that it owns; or it passes ids of a
table's gradient, which are its own (`collective.gradients.rank_parts`). Before anything changes,
ranks compare them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination.functions import eager_writes
from collective.errors import TableError
from collective.gradients import given_rows, rank_parts
from collective.gradients.part_kinds import Kind
from collective.ops.communication import collectives, gate
from collective.ops.exchange import shard_gradients, tensorflow_lookup
from collective.ops.graph import device_scopes, graphs, library_operations
from collective.tables import dense_view
from collective.tables.grouping import before_write
from collective.tables.table import Sharded, in_shard_view
from collective.tables.updates import row_writes

# TensorFlow's operations by the names of its functions and methods.
_OPERATIONS = {
    "update": tf.raw_ops.ResourceScatterUpdate,
    "add": tf.raw_ops.ResourceScatterAdd,
    "sub": tf.raw_ops.ResourceScatterSub,
    "mul": tf.raw_ops.ResourceScatterMul,
    "div": tf.raw_ops.ResourceScatterDiv,
    "min": tf.raw_ops.ResourceScatterMin,
    "max": tf.raw_ops.ResourceScatterMax,
}
HOWS = tuple(_OPERATIONS)
DIFFERENT = (
    "table '{table}': ranks 0 and {value} give different ids or rows for one change of it, of "
    "which each rank would keep its own. Give the same on every rank "
    "(horovod.tensorflow.broadcast(rows, 0) has those of rank 0)"
)


def scatter(original: Callable[..., Any], ref: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `tf.scatter_update`, `scatter_nd_update` and their like, and for methods.

    Args:
        original: the function, or a variable's method of the name.
        ref: the variable.
        *args, **kwargs: the original's: indices and updates, or `IndexedSlices`.

    Returns:
        The variable's value after the change, all rows of a table.

    Raises:
        TableError: `ref` is a dynamic table, or elements are named, not rows.
    """
    if not isinstance(ref, Sharded):
        return original(ref, *args, **kwargs)
    if in_shard_view() or collectives.size() == 1:
        before_write(ref)
        return original(ref, *args, **kwargs)
    name = original.__name__
    how = name.rpartition("_")[2]
    if ref.rows is None:
        ref.refuse(f"{name} (table.import_(session, keys, rows) gives keys their rows)")
    given = inspect.signature(original).bind(ref, *args, **kwargs).arguments
    if "sparse_delta" in given:
        slices = given["sparse_delta"]
        if not isinstance(slices, tf.IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {slices}")
        ids, updates = slices.indices, slices.values
    else:
        ids, updates = given["indices"], given["updates"]
    ids = tf.convert_to_tensor(ids, name="ids")
    updates = tf.convert_to_tensor(updates, ref.dtype.base_dtype, name="updates")
    if "_nd_" in name:
        if tf.compat.dimension_value(ids.shape[-1]) != 1:
            raise TableError(
                f"{name} of table '{ref.op.name}' takes rows, indices [..., 1], not elements "
                f"{ids.shape.as_list()}: change whole rows."
            )
        ids = tf.squeeze(ids, [-1])
    return _scatter(ref, how, ids, updates)


def _scatter(table: Sharded, how: str, ids: tf.Tensor, updates: tf.Tensor) -> tf.Tensor:
    if tf.executing_eagerly():
        return _scatter_eagerly(table, how, ids, updates)
    graph = tf.get_default_graph()
    if not graphs.is_outside(graph) or graphs.is_traced(graph):
        raise TableError(
            f"A scatter of table '{table.op.name}' in tf.cond, tf.while_loop or a function is not "
            "supported: make it outside."
        )
    rank_parts.settle(graph)
    part = rank_parts.part_of(ids)
    with library_operations.noted(graph), device_scopes.anywhere():
        ids = tf.cast(ids, tf.int64)
        waits = []
        if part is None:
            ids, updates = _flat(table, ids, updates)
            waits.append(_checked(table, ids, updates))
            is_owned = tf.equal(table.owners(ids), collectives.rank())
            ids, updates = tf.boolean_mask(ids, is_owned), tf.boolean_mask(updates, is_owned)
        elif given_rows.owns(part, table):
            waits.append(dense_view.agreed(table, f"scatter_{how}"))
        elif part.kind not in (Kind.IDS, Kind.ROWS):
            raise TableError(
                f"A scatter of table '{table.op.name}' takes ids; '{ids.op.name}' has places of "
                "rows among those of this rank."
            )
        else:
            ids, updates = given_rows.of_owners(table, *_flat(table, ids, updates))
            waits.append(dense_view.agreed(table, f"scatter_{how}"))
        with tf.control_dependencies(waits):
            done = _written(table, how, table.rows_of_ids(ids), updates)
    with tf.control_dependencies([done]):
        return dense_view.read(table)


def _scatter_eagerly(table: Sharded, how: str, ids: tf.Tensor, updates: tf.Tensor) -> Any:
    ids, updates = _flat(table, tf.cast(ids, tf.int64), updates)
    given = (ids.numpy(), updates.numpy())
    eager_writes.compare(table, f"scatter_{how}", *given, message=DIFFERENT)
    low, high = int(tf.reduce_min(ids)), int(tf.reduce_max(ids))  # of no ids, no id is outside
    if low <= high and (low < 0 or high >= table.rows):
        check = gate.Check("", (str(table.op.name),), (table.rows,), None)
        raise tf.errors.InvalidArgumentError(None, None, check.says(0, low if low < 0 else high))
    is_owned = tf.equal(table.owners(ids), collectives.rank())
    ids, updates = tf.boolean_mask(ids, is_owned), tf.boolean_mask(updates, is_owned)
    _written(table, how, table.rows_of_ids(ids), updates)
    return table


def _flat(table: Sharded, ids: tf.Tensor, updates: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns ids [K], and a row for each, [K, D]."""
    shape = tf.concat([tf.shape(ids), [table.dim]], 0)
    rows = tf.broadcast_to(updates, shape)
    return tf.reshape(ids, [-1]), tf.reshape(rows, [-1, table.dim])


def _written(table: Sharded, how: str, rows: tf.Tensor, updates: tf.Tensor) -> tf.Operation:
    if row_writes.on_device(table) and how in ("update", "add", "sub"):
        if how == "update":
            return row_writes.write(table, rows, updates)
        updates, rows = shard_gradients.summed(updates, rows)
        write = row_writes.add if how == "add" else row_writes.subtract
        return write(table, rows, updates)
    operation: tf.Operation = _OPERATIONS[how](
        resource=table.handle, indices=rows, updates=tf.identity(updates)
    )
    return operation


def _checked(table: Sharded, ids: tf.Tensor, updates: tf.Tensor) -> tf.Tensor:
    """Makes an operation that runs after ranks agree on equal rows and valid ids."""
    table_name, gates = str(table.op.name), gate.gates_of(tf.get_default_graph())
    name = collectives.unique_name(f"{table_name}/scatter")
    bounds = tensorflow_lookup.bounds(ids)[None]
    gates.checks.append(gate.Check(name, (table_name,), (table.rows,), bounds))
    with device_scopes.on_host():
        own = tf.numpy_function(_digest, [ids, updates], tf.int64)
        own.set_shape([1])
    of_ranks = collectives.allgather(own, name, gates.of_collective([own]).zero)
    with device_scopes.on_host():
        differs = tf.cast(tf.not_equal(of_ranks, of_ranks[0]), tf.int64)
        first = tf.argmax(differs, output_type=tf.int64)  # 0 where none does.
        bounds = tf.stack([first, first])[None]
    opened = gates.after([bounds]).zero
    alike = f"{collectives.ALIKE}{name}.agreed"
    gates.checks.append(gate.Check(alike, (table_name,), (1,), bounds, (DIFFERENT,)))
    # A run that waits for the second gate needs the first one's exchange.
    with tf.name_scope(None), tf.control_dependencies([bounds]):
        return tf.identity(opened, name=alike)


def _digest(ids: np.ndarray, updates: np.ndarray) -> np.ndarray:
    return np.array([eager_writes.digest(ids, updates)], np.int64)
