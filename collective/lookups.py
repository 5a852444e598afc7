"""TensorFlow's lookup functions on tables, by TensorFlow's type-based dispatch: registered once, for the type alone.

`tf.nn.safe_embedding_lookup_sparse`, feature columns and `tf.gather` need nothing of their own: they end in these two.
"""
from __future__ import annotations

from typing import Any, List, Union  # noqa: UP035

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from tensorflow.python.framework import tensor as tensor_lib
from tensorflow.python.ops import variables

from collective import strategies
from collective.ops import communication, kernels
from collective.ops.gate import gates_of
from collective.table import Table

_backend: list[strategies.Backend] = []


def use_backend(backend: strategies.Backend) -> None:
    """Tables are looked up by `backend` from now on."""
    _backend[:] = [backend]


def _checked(table: Table, ids: tf.Tensor) -> strategies.Lookup:
    """The ids as int64, with their bounds. Where no gate can see them, they are checked on the spot.

    That is with one rank, which has no gate, and inside control flow or a function, whose tensors the gate can't reach.
    """
    ids = tf.cast(ids, tf.int64)
    bounds = kernels.bounds(ids)
    hidden = hasattr(bounds.graph, 'outer_graph') or bounds.op._get_control_flow_context() is not None
    if communication.size() > 1 and not hidden:
        return strategies.Lookup(table, ids, bounds)
    check = _check_now(table, bounds)
    if not hidden:
        gates_of(bounds.graph).checked.append(check)
    with tf.control_dependencies([check]):
        return strategies.Lookup(table, tf.identity(ids), None)


def _check_now(table: Table, bounds: tf.Tensor) -> tf.Operation:
    """Raises for an id outside of the table, in the words that the gate has for it."""
    def refuse(low_and_high: np.ndarray) -> np.ndarray:
        low, high = (int(x) for x in low_and_high)
        raise ValueError(f"table '{table.op.name}': id {low if low < 0 else high} is not in [0, {table.rows})")

    fine = tf.logical_or(bounds[0] > bounds[1], tf.logical_and(bounds[0] >= 0, bounds[1] < table.rows))
    return tf.cond(fine, lambda: tf.constant(True), lambda: tf.reshape(tf.numpy_function(refuse, [bounds], tf.bool), [])).op


def _exchange(lookup: strategies.Lookup, name: str | None) -> tf.Tensor:
    # The identity is what later passes re-point: the exchange behind it is complete, so it is never wrong.
    return tf.identity(_backend[0].exchange([lookup])[0], name=name)


def lookup_rows(table: Table, ids: Any, max_norm: float | None, name: str | None) -> tf.Tensor:
    with tf.name_scope(name, 'embedding_lookup') as scope:
        ids = tf.convert_to_tensor(ids, name='ids')
        if not ids.dtype.is_integer:
            raise TypeError(f"table '{table.op.name}': ids must be integers, not {ids.dtype.name}.")
        lookup = _checked(table, ids)
        return _exchange(strategies.Lookup(table, lookup.ids, lookup.bounds, max_norm=max_norm), scope)


def lookup_pooled(table: Table, sparse_ids: Any, sparse_weights: Any, combiner: str | None,
                  max_norm: float | None, name: str | None) -> tf.Tensor:
    combiner = combiner or 'mean'
    if combiner not in ('mean', 'sqrtn', 'sum'):
        raise ValueError(f"combiner must be one of 'mean', 'sqrtn' or 'sum', got {combiner!r} for table '{table.op.name}'.")
    if not isinstance(sparse_ids, tf.SparseTensor):
        raise TypeError(f"table '{table.op.name}': sp_ids must be a SparseTensor, got {type(sparse_ids).__name__}.")
    if sparse_weights is not None and not isinstance(sparse_weights, tf.SparseTensor):
        raise TypeError(
            f"table '{table.op.name}': sp_weights must be None or a SparseTensor, got {type(sparse_weights).__name__}.")
    with tf.name_scope(name, 'embedding_lookup_sparse') as scope:
        lookup = _checked(table, sparse_ids.values)
        return _exchange(strategies.Lookup(table, lookup.ids, lookup.bounds, sparse_ids, sparse_weights, combiner, max_norm),
                         scope)


def _only(params: Table | list[Table]) -> Table:
    """The table of `params`, a table or a list of one."""
    if isinstance(params, Table):
        return params
    if len(params) != 1:
        raise ValueError('A list of tables is not one table: each is sharded by itself. Look up '
                         + ' and '.join(f"'{table.op.name}'" for table in params) + ' one by one.')
    return params[0]


# Whatever ids may be but a RaggedTensor: TensorFlow's own dispatch takes those apart and calls again.
Ids = Union[tensor_lib.Tensor, variables.Variable, np.ndarray, np.generic, list, tuple, int]
Sparse = Union[tf.SparseTensor, tf.SparseTensorValue, tensor_lib.Tensor]


def _register() -> None:
    for kind in (Table, List[Table]):  # noqa: UP006 (TensorFlow knows typing.List only)
        @tf2.experimental.dispatch_for_api(tf.nn.embedding_lookup, {'params': kind, 'ids': Ids})
        def _v1_rows(params, ids, partition_strategy='mod', name=None, validate_indices=True, max_norm=None):
            return lookup_rows(_only(params), ids, max_norm, name)

        @tf2.experimental.dispatch_for_api(tf2.nn.embedding_lookup, {'params': kind, 'ids': Ids})
        def _v2_rows(params, ids, max_norm=None, name=None):
            return lookup_rows(_only(params), ids, max_norm, name)

        @tf2.experimental.dispatch_for_api(tf.nn.embedding_lookup_sparse, {'params': kind, 'sp_ids': Sparse})
        def _v1_pooled(params, sp_ids, sp_weights, partition_strategy='mod', name=None, combiner=None,
                       max_norm=None, allow_fast_lookup=False):
            return lookup_pooled(_only(params), sp_ids, sp_weights, combiner, max_norm, name)

        @tf2.experimental.dispatch_for_api(tf2.nn.embedding_lookup_sparse, {'params': kind, 'sp_ids': Sparse})
        def _v2_pooled(params, sp_ids, sp_weights, combiner=None, max_norm=None, name=None,
                       allow_fast_lookup=False):
            return lookup_pooled(_only(params), sp_ids, sp_weights, combiner, max_norm, name)


_register()
