"""Carries out TensorFlow's lookup functions on tables, by its type-based dispatch.

The functions are registered once, by type. `tf.nn.safe_embedding_lookup_sparse`, feature columns
and `tf.gather` call `embedding_lookup` and `embedding_lookup_sparse`, so they need no functions of
their own. The exception is the first on dynamic tables, because TensorFlow's own function treats
negative keys as invalid.
"""

from __future__ import annotations

from typing import Any, List, Union  # noqa: UP035

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import strategies
from collective.ops import key_hashing, native_library
from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.counting import counted
from collective.ops.exchange import tensorflow_lookup
from collective.ops.graph import device_scopes, graphs, library_operations
from collective.tables import eager_lookups, traced_lookups
from collective.tables.dynamic_table import DynamicTable
from collective.tables.grouping import exchange_alone, lookups_of
from collective.tables.served_table import ServedDynamicTable, ServedTable, look_up
from collective.tables.table import Sharded
from collective.tensorflow_internals.graphs import tape
from collective.tensorflow_internals.graphs import tensor as tensor_lib
from collective.tensorflow_internals.variables import variables


def _checked(table: Sharded | ServedTable, ids: tf.Tensor) -> strategies.Lookup:
    """Returns a lookup of the ids as int64, for the gate to check.

    They are checked immediately inside control flow or a function, whose tensors the gate can't
    reach. So are they on one rank, which has no gate, if there are no compiled operations.
    """
    if not (ids.dtype.is_integer or table.rows is None and ids.dtype == tf.string):
        raise TypeError(f"table '{table.op.name}': ids must be integers, not {ids.dtype.name}.")
    ids = _as_keys(table, ids)
    # Every key of a dynamic table is valid; TensorFlow's own operations check a served table's ids.
    graph = tf.get_default_graph()
    if table.rows is None or isinstance(table, ServedTable) or traced_lookups.is_scratch(graph):
        return strategies.Lookup(table, ids, False)
    hidden = graphs.is_function(graph) or graph._get_control_flow_context() is not None
    if not hidden and (collectives.size() > 1 or native_library.missing() is None):
        return strategies.Lookup(table, ids, True)
    check = _check_now(table, tensorflow_lookup.bounds(ids))
    if not hidden:
        gates_of(graph).checked.append(check)
    with tf.control_dependencies([check]):
        return strategies.Lookup(table, tf.identity(ids), False)


def _as_keys(table: Sharded | ServedTable, ids: tf.Tensor) -> tf.Tensor:
    """Returns int64 keys of `ids`; strings are keys of dynamic tables only."""
    if table.rows is None and ids.dtype == tf.string:
        return key_hashing.of_strings(ids)
    # Where they are checked.
    with device_scopes.on_host():
        return tf.cast(ids, tf.int64)


def _check_now(table: Sharded, bounds: tf.Tensor) -> tf.Operation:
    """Raises for an id outside of the table, in the gate's words."""

    def refuse(low_and_high: np.ndarray) -> np.ndarray:
        low, high = (int(x) for x in low_and_high)
        raise ValueError(
            f"table '{table.op.name}': id {low if low < 0 else high} is not in [0, {table.rows})"
        )

    with device_scopes.on_host():
        is_inside = tf.logical_or(
            bounds[0] > bounds[1], tf.logical_and(bounds[0] >= 0, bounds[1] < table.rows)
        )
        return tf.cond(
            is_inside,
            lambda: tf.constant(True),
            lambda: tf.reshape(tf.numpy_function(refuse, [bounds], tf.bool), []),
        ).op


def _exchange(lookup: strategies.Lookup, name: str | None) -> tf.Tensor:
    if isinstance(lookup.table, ServedTable):
        return tf.identity(look_up(lookup), name=name)
    if lookup.table.trainable:
        # A tf.GradientTape then watches the table, as it does variables that it sees read.
        tape.variable_accessed(lookup.table)
    if traced_lookups.is_scratch(tf.get_default_graph()):
        return traced_lookups.of_shape(lookup, name)
    if graphs.is_traced(tf.get_default_graph()):
        return traced_lookups.stand_in(lookup, name)
    # Grouping points the identity elsewhere. The exchange before it is complete, so it is never
    # wrong.
    with library_operations.noted(tf.get_default_graph()):
        rows, reason = exchange_alone(lookup)
    out = tf.identity(rows, name=name)
    lookups_of(out.graph).add(lookup, out, reason)
    return out


def lookup_rows(
    table: Sharded | ServedTable, ids: Any, max_norm: float | None, name: str | None
) -> tf.Tensor:
    with tf.name_scope(name, "embedding_lookup") as scope:
        ids = tf.convert_to_tensor(ids, name="ids")
        if tf.executing_eagerly() and isinstance(table, Sharded):
            return eager_lookups.rows(table, ids, max_norm, lookup_rows)
        ids = traced_lookups.inside(table, ids)
        with device_scopes.anywhere():
            lookup = _checked(table, ids)
        return _exchange(
            strategies.Lookup(table, lookup.ids, lookup.unchecked, max_norm=max_norm), scope
        )


def lookup_pooled(
    table: Sharded | ServedTable,
    sparse_ids: Any,
    sparse_weights: Any,
    combiner: str | None,
    max_norm: float | None,
    name: str | None,
) -> tf.Tensor:
    combiner = combiner or "mean"
    if combiner not in ("mean", "sqrtn", "sum"):
        raise ValueError(
            f"combiner must be one of 'mean', 'sqrtn' or 'sum', got {combiner!r} for table "
            f"'{table.op.name}'."
        )
    if not isinstance(sparse_ids, tf.SparseTensor):
        raise TypeError(
            f"table '{table.op.name}': sp_ids must be a SparseTensor, got "
            f"{type(sparse_ids).__name__}."
        )
    if sparse_weights is not None and not isinstance(sparse_weights, tf.SparseTensor):
        raise TypeError(
            f"table '{table.op.name}': sp_weights must be None or a SparseTensor, got "
            f"{type(sparse_weights).__name__}."
        )
    if sparse_weights is not None:  # As TensorFlow does, where shapes are known.
        for part in ("values", "indices", "dense_shape"):
            of_ids, of_weights = getattr(sparse_ids, part), getattr(sparse_weights, part)
            of_ids.shape.assert_is_compatible_with(of_weights.shape)
    if tf.executing_eagerly() and isinstance(table, Sharded):
        return eager_lookups.pooled(
            table, sparse_ids, sparse_weights, combiner, max_norm, lookup_pooled
        )
    sparse_ids = traced_lookups.inside(table, sparse_ids)
    if sparse_weights is not None:
        sparse_weights = traced_lookups.inside(table, sparse_weights)
    with tf.name_scope(name, "embedding_lookup_sparse") as scope:
        with device_scopes.anywhere():
            lookup = _checked(table, sparse_ids.values)
        return _exchange(
            strategies.Lookup(
                table, lookup.ids, lookup.unchecked, sparse_ids, sparse_weights, combiner, max_norm
            ),
            scope,
        )


def for_all_samples(pooled: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a lookup, and zeros for samples after the last one that has a key.

    Earlier samples without keys have zeros already.

    Args:
        pooled: [b, D].
        samples: how many samples there are, int64 scalar, b at least.
    """
    with device_scopes.anywhere():
        rows = tf.shape(pooled)[0]
        with device_scopes.on_host():
            # TensorFlow has shapes of int32, not of int64, on the host.
            missing = tf.cast(samples, tf.int32) - rows
        return tf.pad(pooled, [[0, missing], [0, 0]])


def lookup_safely(
    table: DynamicTable | ServedDynamicTable,
    sparse_ids: Any,
    sparse_weights: Any,
    combiner: str | None,
    default_id: Any,
    max_norm: float | None,
    name: str | None,
) -> tf.Tensor:
    """Computes `tf.nn.safe_embedding_lookup_sparse` where every key is valid.

    Only weights that aren't positive are pruned (with the combiners that divide by them, as in
    TensorFlow). A sample without keys gets zeros without a lookup.
    """
    if not isinstance(sparse_ids, tf.SparseTensor):
        raise TypeError(
            f"table '{table.op.name}': sparse_ids must be a SparseTensor, got "
            f"{type(sparse_ids).__name__}."
        )
    with tf.name_scope(name, "embedding_lookup"), device_scopes.anywhere():
        shape = sparse_ids.dense_shape
        samples = tf.reduce_prod(shape[:-1])
        ids = tf.sparse.reshape(sparse_ids, tf.stack([samples, shape[-1]]))
        ids = tf.SparseTensor(ids.indices, _as_keys(table, ids.values), ids.dense_shape)
        weights = (
            None
            if sparse_weights is None
            else tf.SparseTensor(ids.indices, sparse_weights.values, ids.dense_shape)
        )
        if weights is not None and combiner != "sum":
            positive = weights.values > 0
            ids, weights = tf.sparse.retain(ids, positive), tf.sparse.retain(weights, positive)
        if default_id is not None:
            ids = tf.sparse.fill_empty_rows(ids, _as_keys(table, tf.convert_to_tensor(default_id)))[
                0
            ]
            weights = (
                weights
                if weights is None
                else tf.sparse.fill_empty_rows(weights, tf.ones([], weights.dtype))[0]
            )
        pooled = lookup_pooled(table, ids, weights, combiner, max_norm, None)
        with device_scopes.on_host():
            shape_of_out = tf.concat([shape[:-1], [table.dim]], 0)
        out = tf.reshape(for_all_samples(pooled, samples), shape_of_out)
        rank = tf.compat.dimension_value(shape.shape[0])
        out.set_shape(tf.TensorShape(None if rank is None else [None] * (rank - 1) + [table.dim]))
        return out


def _only(params: Sharded | ServedTable | list[Any]) -> Any:
    """Returns the table of `params`, a table or a list of one."""
    if isinstance(params, ServedTable):
        return params
    if isinstance(params, Sharded):
        params.check_is_looked_up()
        return params
    if len(params) != 1:
        raise ValueError(
            "A list of tables is not one table: each is sharded on its own. Look up "
            + " and ".join(f"'{table.op.name}'" for table in params)
            + " one by one."
        )
    return _only(params[0])


def _in_order(params: Sharded | ServedTable | list[Any], partition_strategy: str) -> Any:
    """Returns the table of `params`; warns if TensorFlow would have its rows in another order.

    It finds id k in part k mod P of a variable in P parts, unless `partition_strategy` is 'div'.
    """
    table = _only(params)
    parts = getattr(table, "parts_elsewhere", 1)
    if partition_strategy == "mod" and parts > 1:
        table.parts_elsewhere = 1  # It is said once.
        if collectives.rank() == 0:
            tf.logging.warning(
                f"table '{table.op.name}': its partitioner makes {counted(parts, 'part')} in plain "
                f"TensorFlow, where this lookup finds id k in part k mod {parts} "
                "(partition_strategy='mod'). Here row k is id k. So the rows of a checkpoint that "
                "plain TensorFlow has written with this partitioner, and of the table as one "
                "value, are in another order there. partition_strategy='div' has one order in both."
            )
    return table


def _shape(table: Sharded, out_type: Any, name: str | None) -> tf.Tensor:
    if table.rows is None:
        table.refuse("tf.shape")
    return tf.constant(table.shape.as_list(), out_type or tf.int32, name=name)


# All types of ids except RaggedTensor, which TensorFlow's own dispatch takes apart before it calls
# again.
Ids = Union[tensor_lib.Tensor, variables.Variable, np.ndarray, np.generic, list, tuple, int]
Sparse = Union[tf.SparseTensor, tf.SparseTensorValue, tensor_lib.Tensor]


def _register() -> None:
    # TensorFlow's dispatch knows typing.List, but not list.
    for kind in (Sharded, List[Sharded], ServedTable, List[ServedTable]):  # noqa: UP006

        @tf2.experimental.dispatch_for_api(tf.nn.embedding_lookup, {"params": kind, "ids": Ids})
        def _v1_rows(
            params, ids, partition_strategy="mod", name=None, validate_indices=True, max_norm=None
        ):
            return lookup_rows(_in_order(params, partition_strategy), ids, max_norm, name)

        @tf2.experimental.dispatch_for_api(tf2.nn.embedding_lookup, {"params": kind, "ids": Ids})
        def _v2_rows(params, ids, max_norm=None, name=None):
            return lookup_rows(_only(params), ids, max_norm, name)

        @tf2.experimental.dispatch_for_api(
            tf.nn.embedding_lookup_sparse, {"params": kind, "sp_ids": Sparse}
        )
        def _v1_pooled(
            params,
            sp_ids,
            sp_weights,
            partition_strategy="mod",
            name=None,
            combiner=None,
            max_norm=None,
            allow_fast_lookup=False,
        ):
            table = _in_order(params, partition_strategy)
            return lookup_pooled(table, sp_ids, sp_weights, combiner, max_norm, name)

        @tf2.experimental.dispatch_for_api(
            tf2.nn.embedding_lookup_sparse, {"params": kind, "sp_ids": Sparse}
        )
        def _v2_pooled(
            params,
            sp_ids,
            sp_weights,
            combiner=None,
            max_norm=None,
            name=None,
            allow_fast_lookup=False,
        ):
            return lookup_pooled(_only(params), sp_ids, sp_weights, combiner, max_norm, name)

    # A table's shape is known without reading anything.
    @tf2.experimental.dispatch_for_api(tf.shape, {"input": Sharded})
    def _v1_shape(input, name=None, out_type=None):
        return _shape(input, out_type, name)

    @tf2.experimental.dispatch_for_api(tf2.shape, {"input": Sharded})
    def _v2_shape(input, out_type=None, name=None):
        return _shape(input, out_type, name)

    @tf2.experimental.dispatch_for_api(tf.nn.l2_loss, {"t": Sharded})
    def _l2_loss(t, name=None):
        return t.l2_loss(name)

    for dynamic in (DynamicTable, List[DynamicTable], ServedDynamicTable, List[ServedDynamicTable]):  # noqa: UP006
        safe: Any = {"embedding_weights": dynamic, "sparse_ids": Sparse}

        @tf2.experimental.dispatch_for_api(tf.nn.safe_embedding_lookup_sparse, safe)
        def _v1_safe(
            embedding_weights,
            sparse_ids,
            sparse_weights=None,
            combiner="mean",
            default_id=None,
            name=None,
            partition_strategy="div",
            max_norm=None,
            allow_fast_lookup=False,
        ):
            return lookup_safely(
                _only(embedding_weights),
                sparse_ids,
                sparse_weights,
                combiner,
                default_id,
                max_norm,
                name,
            )

        @tf2.experimental.dispatch_for_api(tf2.nn.safe_embedding_lookup_sparse, safe)
        def _v2_safe(
            embedding_weights,
            sparse_ids,
            sparse_weights=None,
            combiner="mean",
            default_id=None,
            max_norm=None,
            name=None,
            allow_fast_lookup=False,
        ):
            return lookup_safely(
                _only(embedding_weights),
                sparse_ids,
                sparse_weights,
                combiner,
                default_id,
                max_norm,
                name,
            )


_register()
