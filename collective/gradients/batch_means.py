"""Weighs the means over a rank's batch, of which a loss consists, by the rank's records.

An update takes the mean of the ranks' gradients. If ranks have different numbers of records, as in
the last batch of an epoch, or where N doesn't divide a batch, that isn't the gradient of the mean
over all records: with b records on a rank, and B on all, a rank's mean has to count N * b/B times.
A session's graph shows the means:

    loss ── sums, constant factors ── a mean over the first dimension ── … ── data of b records
                                      (tf.reduce_mean, tf.losses, a sum divided by its number)

Only their gradients are weighed, not what is fetched. Ranks say how many records they have when
they agree on the run, so it takes no exchange. What isn't seen to be such a mean counts alike on
all ranks: a sum, a mean inside of a root, a mean of what ranks exchange.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.gradients.reduction import is_variable
from collective.ops.communication.gate import gates_of
from collective.ops.graph import (
    device_scopes,
    graph_analysis,
    graph_state,
    graphs,
    library_operations,
)
from collective.replication import cross_replica
from collective.replication.analysis import ReplicationAnalysis
from collective.replication.pending_syncs import analysis_of
from collective.tables.grouping import lookups_of
from collective.tensorflow_internals.graphs import attr_value_pb2, gradient_registry

_GRADIENT = "CollectiveMeanOverBatch"
_OVERRIDE = "_gradient_op_type"
# Operations whose result is linear in their inputs.
_LINEAR = frozenset(
    "Identity Neg Cast Reshape Squeeze ExpandDims CheckNumerics Add AddV2 AddN Sub Pack ConcatV2 "
    "Sum Mean".split()
)
_QUOTIENTS = frozenset({"RealDiv", "DivNoNan"})
# What numbers of a batch are computed by.
_OF_SHAPES = frozenset(
    "Const Cast Identity Reshape StridedSlice Prod Mul GatherV2 Pack Squeeze ExpandDims Maximum "
    "Sum Range ConcatV2 Fill BroadcastTo Select SelectV2 Equal NotEqual".split()
)
_SHAPES = frozenset({"Shape", "Size", "Rank", "OnesLike", "ZerosLike"})
# Operations with the first dimension of their inputs of the same rank.
_BY_ELEMENT = frozenset(
    "Add AddV2 AddN Sub Mul RealDiv DivNoNan Maximum Minimum Pow SquaredDifference Xdivy Xlogy "
    "Select SelectV2 Neg Square Sqrt Rsqrt Exp Expm1 Log Log1p Sigmoid Tanh Relu Relu6 LeakyRelu "
    "Elu Selu Softplus Softsign Abs Sign Cast Identity CheckNumerics StopGradient ClipByValue "
    "Reciprocal Softmax LogSoftmax Greater GreaterEqual Less LessEqual Equal NotEqual LogicalAnd "
    "LogicalOr LogicalNot OnesLike ZerosLike Round Floor".split()
)
# Operations with the first dimension of their first input.
_BY_SAMPLE = frozenset({"BiasAdd", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"})
_CROSS_ENTROPIES = frozenset(
    {"SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"}
)
_REDUCTIONS = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin"})


@dataclasses.dataclass
class BatchMeans:
    """Records the means of a graph whose gradients are weighed.

    Attributes:
        weights: of each mean, by what its gradient is multiplied.
        by_length: the weights by the names of tensors with that many records.
    """

    weights: dict[tf.Operation, tf.Tensor] = dataclasses.field(default_factory=dict)
    by_length: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def weighed(target: Any, sources: Any, weights: Any = None) -> Iterator[None]:
    """Inside, the gradients of a loss with respect to variables weigh its means.

    Args:
        target: what is differentiated, tensors in any structure.
        sources: with respect to what.
        weights: what the gradients of `target` are multiplied by (`grad_ys`): then it isn't a loss.
    """
    means: list[tf.Operation] = []
    graph = tf.get_default_graph()
    is_own = cross_replica.is_alone() or weights is not None or not graphs.is_outside(graph)
    if not is_own and any(is_variable(x) for x in tf.nest.flatten(sources)):
        means = _weighed_means(graph, target)
    # A copy of the graph is to have the gradients of TensorFlow.
    for mean in means:
        mean._set_attr(_OVERRIDE, attr_value_pb2.AttrValue(s=_GRADIENT.encode()))
    try:
        yield
    finally:
        for mean in means:
            mean._clear_attr(_OVERRIDE)


def _weighed_means(graph: tf.Graph, target: Any) -> list[tf.Operation]:
    """Returns the means of a loss whose weights are known, once these are noted."""
    analysis, known = analysis_of(graph), graph_state.of(graph, BatchMeans)
    found = []
    for loss in tf.nest.flatten(target):
        if not isinstance(loss, tf.Tensor) or loss.graph is not graph or loss.shape.rank != 0:
            continue
        for mean, of in _means(loss, analysis):
            weight = None if _has_gradient_of_its_own(mean) else _weight(known, of)
            if weight is not None:
                known.weights[mean] = weight
                found.append(mean)
    return found


@tf.RegisterGradient(_GRADIENT)
def _weighed_gradient(op: tf.Operation, gradient: tf.Tensor) -> Any:
    weight = graph_state.of(op.graph, BatchMeans).weights[op]
    return gradient_registry.lookup(op.type)(op, gradient * tf.cast(weight, gradient.dtype))


def _has_gradient_of_its_own(op: tf.Operation) -> bool:
    return _OVERRIDE in op.node_def.attr


def _weight(known: BatchMeans, x: tf.Tensor) -> tf.Tensor | None:
    """Returns N times this rank's share of the records of `x`, its first dimension.

    None: no data are seen that have as many, and are known before ranks exchange anything.
    """
    alike = _of_same_length(x)
    weight = next((known.by_length[name] for name in alike if name in known.by_length), None)
    if weight is None:
        nearest = _data_among(list(alike.values()))
        if nearest is None:
            return None
        # Not after what a script has its updates wait for, which ranks may exchange.
        with library_operations.noted(x.graph), graphs.outside(), device_scopes.on_host():
            count = tf.shape(nearest, out_type=tf.int64)[0]
            weight = cross_replica.weight_of(count)
    known.by_length.update(dict.fromkeys(alike, weight))
    return weight


def _means(
    loss: tf.Tensor, analysis: ReplicationAnalysis
) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """Yields the means over the batch on which `loss` depends linearly, and what each is of."""
    stack, seen = [loss], set()
    while stack:
        op = stack.pop().op
        if op in seen or op._get_control_flow_context() is not None:
            continue
        seen.add(op)
        if op.type == "Mean" and _reduces_batch(op) and analysis.is_per_sample([op.inputs[0]]):
            yield op, op.inputs[0]
        elif op.type in _QUOTIENTS and analysis.is_rank_local([op.inputs[1]]):
            total = _passed_on(op.inputs[0]).op
            if total.type == "Sum" and _reduces_batch(total):
                if _is_number_of(op.inputs[1], total.inputs[0]):
                    yield op, total.inputs[0]
        elif op.type in _QUOTIENTS:
            stack.append(op.inputs[0])
        elif op.type == "Mul":
            local = [x for x in op.inputs if analysis.is_rank_local([x])]
            stack += local if len(local) == 1 else []
        elif op.type == "Sum" and analysis.is_per_sample([op.inputs[0]]):
            continue
        elif op.type in _LINEAR:
            stack += op.inputs


def _passed_on(x: tf.Tensor) -> tf.Tensor:
    """Returns the number that is passed on as `x`."""
    while x.op.type in ("Identity", "Cast", "Reshape") or (
        x.op.type == "Sum" and x.op.inputs[0].shape.rank == 0
    ):
        x = x.op.inputs[0]
    return x


def _reduces_batch(op: tf.Operation) -> bool:
    """Tells whether a reduction is over the first dimension, among others."""
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if not rank or axes is None:
        return False
    return any(int(axis) % rank == 0 for axis in axes.reshape(-1))


def _is_number_of(number: tf.Tensor, x: tf.Tensor) -> bool:
    """Tells whether a number follows from how many records `x` has, its first dimension.

    It is computed from shapes alone, of what has as many records, and from no other dimension of
    these by itself.
    """

    def stop(op: tf.Operation) -> bool:
        return op.type in _SHAPES

    walked = graph_analysis.walk([number.op], stop=stop, control=False)
    alike = _of_same_length(x)
    shaped = [op.inputs[0] for op in walked if stop(op)]
    return (
        all(op.type in _OF_SHAPES | _SHAPES for op in walked)
        and bool(shaped)
        and all(each.name in alike for each in shaped)
        and all(_takes_first(op) for op in walked if op.type in ("StridedSlice", "GatherV2"))
    )


def _takes_first(op: tf.Operation) -> bool:
    """Tells whether a slice of a shape is its first number."""
    begin = tf.get_static_value(op.inputs[1])
    return begin is not None and np.reshape(begin, [-1]).tolist() == [0]


def _of_same_length(x: tf.Tensor) -> dict[str, tf.Tensor | tf.SparseTensor]:
    """Returns what is upstream of `x` and has as many records, by names, the nearest first."""
    lookups = {each.out: each.lookup for each in lookups_of(x.graph).written}
    queue: collections.deque[tf.Tensor | tf.SparseTensor] = collections.deque([x])
    found: dict[str, tf.Tensor | tf.SparseTensor] = {}
    while queue:
        x = queue.popleft()
        shape = x.dense_shape if isinstance(x, tf.SparseTensor) else x
        if shape.name in found or not shape.shape.rank:
            continue
        found[shape.name] = x
        if isinstance(x, tf.SparseTensor):
            continue
        if x.op in lookups:
            lookup = lookups[x.op]
            queue.append(lookup.ids if lookup.sparse_ids is None else lookup.sparse_ids)
        else:
            queue += _inputs_of_same_length(x)
    return found


def _data_among(
    tensors: Sequence[tf.Tensor | tf.SparseTensor],
) -> tf.Tensor | tf.SparseTensor | None:
    """Returns the first of some tensors that is known before the gates; None if none is.

    What a run takes or is fed comes before what is computed from such data alone.
    """
    known = [
        (x, op)
        for x in tensors
        if (op := (x.dense_shape if isinstance(x, tf.SparseTensor) else x).op)
        and op._get_control_flow_context() is None
        and not gates_of(op.graph).level(op)
    ]
    for x, op in known:
        if op.type in graph_analysis.SOURCES | graph_analysis.FED:
            return x
    return next((x for x, op in known if _is_of_data(op)), None)


def _is_of_data(op: tf.Operation) -> bool:
    """Tells whether an operation computes something from data, and from no variable."""
    types = {each.type for each in graph_analysis.upstream([op])}
    is_of_data = any(map(graph_analysis.gives_other_values, types))
    return is_of_data and types.isdisjoint(graph_analysis.VARIABLE_TYPES)


def _inputs_of_same_length(x: tf.Tensor) -> list[tf.Tensor]:
    """Returns those inputs of an operation from which `x` has its first dimension."""
    op, inputs = x.op, list(x.op.inputs)
    keeps_first: bool
    if op.type in _BY_ELEMENT:
        return [
            each
            for each in inputs
            if each.shape.rank == x.shape.rank and each.shape[0] in (None, x.shape[0])
        ]
    if op.type in _CROSS_ENTROPIES:
        return inputs
    if op.type == "ConcatV2":
        axis = tf.get_static_value(inputs[-1])
        return inputs[:-1] if axis is not None and axis % x.shape.rank else []
    if op.type in ("GatherV2", "ResourceGather"):
        of_rows = op.type == "ResourceGather" or tf.get_static_value(inputs[2]) == 0
        return [inputs[1]] if of_rows and not op.get_attr("batch_dims") else []
    if op.type == "MatMul":
        keeps_first = not op.get_attr("transpose_a")
    elif op.type == "OneHot":
        keeps_first = op.get_attr("axis") != 0
    elif op.type in _REDUCTIONS:
        keeps_first = not _reduces_batch(op)
    elif op.type == "Squeeze":
        axes = op.get_attr("squeeze_dims")
        keeps_first = bool(axes) and 0 not in axes and -(inputs[0].shape.rank or 0) not in axes
    elif op.type == "ExpandDims":
        axis = tf.get_static_value(inputs[1])
        keeps_first = axis is not None and axis % x.shape.rank != 0
    elif op.type == "StridedSlice":
        keeps_first = _keeps_first(op)
    elif op.type == "Reshape":
        before, after = (_size_of_a_row(each.shape) for each in (inputs[0], x))
        keeps_first = before is not None and before == after
    else:
        keeps_first = op.type in _BY_SAMPLE
    return inputs[:1] if keeps_first else []


def _keeps_first(op: tf.Operation) -> bool:
    """Tells whether a slice has all of the first dimension."""
    masks = {name: op.get_attr(f"{name}_mask") & 1 for name in ("begin", "end", "ellipsis")}
    changed = (op.get_attr("shrink_axis_mask") | op.get_attr("new_axis_mask")) & 1
    strides = tf.get_static_value(op.inputs[3])
    if masks["ellipsis"]:
        named = op.inputs[1].shape.num_elements() - 1
        return (op.inputs[0].shape.rank or 0) > named and not changed
    whole = masks["begin"] and masks["end"] and strides is not None and strides[0] == 1
    return bool(whole) and not changed


def _size_of_a_row(shape: tf.TensorShape) -> int | None:
    """Returns how many numbers there are for each place of the first dimension, if it is known."""
    return shape[1:].num_elements() if shape.rank else None
