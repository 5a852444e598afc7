"""Gradients are reduced once, where they are taken: TensorFlow's `tf.gradients` and `compute_gradients` end in one function.

With respect to a replicated variable the gradient becomes the mean over ranks, with respect to a table the sum that its
exchange gives divided by N; with respect to anything else it stays as it is. Training thus minimises the mean of the
ranks' losses. The means are differentiable, so a penalty on a gradient sees, and differentiates, the global one.
"""
from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variables

from collective import runs
from collective.ops import communication, gate
from collective.replicated import mark_shard
from collective.table import Table, shard_view

VARIABLE_OPS = ('VarHandleOp', 'VariableV2', 'Variable')


class TableGradient(tf.IndexedSlices):
    """The gradient of a table: this rank's shard of it. Norms over it are the whole gradient's, see `global_norm`."""


def _table_of(x: Any) -> Table | None:
    if isinstance(x, Table):
        return x
    for variable in tf.global_variables():
        if isinstance(variable, Table) and variable.handle is x:
            return variable
    return None


def _is_variable(x: Any) -> bool:
    if isinstance(x, variables.Variable):
        return True
    return isinstance(x, tf.Tensor) and x.op.type in VARIABLE_OPS


def reduce_gradients(gradients: Sequence[Any], xs: Sequence[Any], mean: bool) -> list[Any]:
    """The gradients of all ranks.

    Args:
        gradients: what TensorFlow computed on this rank, with respect to `xs`; `None` for what isn't connected.
        xs: variables, tables, tensors.
        mean: a table's gradient is the mean of the ranks' gradients; else their sum.
    """
    out, dense = list(gradients), []
    for i, (gradient, x) in enumerate(zip(gradients, xs)):
        if gradient is None or not _is_variable(x):
            continue
        if _table_of(x) is not None:
            out[i] = _table_gradient(gradient, mean)
        elif communication.size() == 1:
            continue
        elif isinstance(gradient, tf.IndexedSlices):
            out[i] = _mean_slices(gradient, x)
        else:
            dense.append(i)
    for i, reduced in zip(dense, _mean_dense([gradients[i] for i in dense])):
        out[i] = reduced
    return out


def _table_gradient(gradient: Any, mean: bool) -> TableGradient:
    if not isinstance(gradient, tf.IndexedSlices):      # a loop's: TensorFlow adds up whole matrices there, here the shard's
        shape = tf.shape(gradient)
        gradient = tf.IndexedSlices(gradient, tf.range(shape[0]), shape)
    ranks = communication.size()
    values = gradient.values if not mean or ranks == 1 else gradient.values / tf.cast(ranks, gradient.dtype)
    return TableGradient(values, gradient.indices, gradient.dense_shape)


def _mean_slices(gradient: tf.IndexedSlices, x: Any) -> tf.IndexedSlices:
    """A replicated variable's sparse gradient stays sparse: every rank gets everyone's slices."""
    name, zero = x.name.partition(':')[0], _gate([gradient.values, gradient.indices])
    values = communication.allgather(gradient.values / tf.cast(communication.size(), gradient.dtype),
                                     communication.unique_name(f'{name}/gradient_values'), zero)
    indices = communication.allgather(gradient.indices, communication.unique_name(f'{name}/gradient_indices'), zero)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _mean_dense(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """One allreduce per dtype for all of them. Half-precision gradients are added in float32."""
    by_dtype: dict[tf.DType, list[int]] = collections.defaultdict(list)
    for i, gradient in enumerate(gradients):
        by_dtype[tf.float32 if gradient.dtype in (tf.float16, tf.bfloat16) else gradient.dtype].append(i)
    out: list[Any] = [None] * len(gradients)
    for dtype, which in by_dtype.items():
        sums = communication.allreduce_sum([tf.cast(gradients[i], dtype) for i in which],
                                           communication.unique_name('dense_gradients'),
                                           _gate([gradients[i] for i in which]))
        for i, total in zip(which, sums):
            out[i] = tf.cast(total / tf.cast(communication.size(), dtype), gradients[i].dtype)
    return out


def _gate(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return gate.gates_of(tf.get_default_graph()).beside(tensors).zero


def global_norm(original: Any, t_list: Sequence[Any], name: str | None = None) -> tf.Tensor:
    """`tf.linalg.global_norm`, in which a table's gradient counts whole, every shard once.

    Repeated ids are summed first: the norm is that of the gradient as a matrix. (Plain TensorFlow takes each occurrence of a
    repeated id for a row of its own.)
    """
    tables = [t for t in t_list if isinstance(t, TableGradient)]
    rest = [t for t in t_list if not isinstance(t, TableGradient)]
    if not tables:
        return original(t_list, name)
    with tf.name_scope(name, 'global_norm'):
        squares = tf.add_n([_squares(t) for t in tables])
        if communication.size() > 1:
            squares = communication.allreduce_sum([squares], communication.unique_name('global_norm'), _gate([squares]))[0]
        if any(t is not None for t in rest):
            squares += tf.square(tf.cast(original(rest), squares.dtype))
        return tf.sqrt(squares)


def _squares(gradient: TableGradient) -> tf.Tensor:
    rows, positions = tf.unique(gradient.indices)
    return tf.reduce_sum(tf.square(tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))))


def apply_to_shards(original: Any, optimizer: tf.train.Optimizer, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    """`Optimizer.apply_gradients`, in which tables present themselves as their shards: slots and updates are local.

    No update starts before everything that can refuse the step, upstream of any of the gradients, has let it pass: a step
    that can't be taken leaves nothing half-applied.
    """
    grads_and_vars = tuple(grads_and_vars)
    gates = gate.gates_of(tf.get_default_graph())
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g, _ in grads_and_vars if g is not None]
    upstream = runs.upstream(g.op for g in values if isinstance(g, tf.Tensor))
    refusing = [opened.zero.op for opened in gates.gates] + gates.checked
    with shard_view(), tf.control_dependencies([op for op in refusing if op in upstream]):
        applied = original(optimizer, grads_and_vars, *args, **kwargs)
    for _, variable in grads_and_vars:
        if isinstance(variable, Table):
            for slot in optimizer.get_slot_names():
                mark_shard(optimizer.get_slot(variable, slot))
    return applied
