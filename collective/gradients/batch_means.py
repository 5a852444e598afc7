"""Weighs the means over a rank's batch, of which a loss consists, by the rank's records.

An update takes the mean of the ranks' gradients. If ranks have different numbers of records, as in
the last batch of an epoch, or where N doesn't divide a batch, that isn't the gradient of the mean
over all records: with b records on a rank, and B on all, a rank's mean has to count N * b/B times.
The graph of a session, or of a function that eager code calls, shows the means:

    loss ── sums, constant factors ── a mean over the batch ── … ── data of b records
                                      (tf.reduce_mean, tf.losses, a sum divided by its number)

Only their gradients are weighed, not what is fetched. Ranks say how many records they have when
they agree on the run, so it takes no exchange. What isn't seen to be such a mean counts alike on
all ranks: a sum, a mean inside of a root, a mean of what ranks exchange.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.gradients.reduction import is_variable
from collective.ops.communication.gate import gates_of
from collective.ops.graph import (
    device_scopes,
    dimension_origins,
    graph_analysis,
    graph_state,
    graphs,
    library_operations,
)
from collective.ops.graph.dimension_origins import Dimension
from collective.replication import cross_replica
from collective.replication.analysis import ReplicationAnalysis
from collective.replication.pending_syncs import analysis_of
from collective.strategies import Lookup
from collective.tables.grouping import lookups_of
from collective.tensorflow_internals.graphs import attr_value_pb2, gradient_registry

_GRADIENT = "CollectiveMeanOverBatch"
_OVERRIDE = "_gradient_op_type"
# Operations whose result is linear in their inputs.
_LINEAR = frozenset(
    "Identity Neg Cast Reshape Squeeze ExpandDims CheckNumerics EnsureShape Print Add AddV2 AddN "
    "Sub Pack ConcatV2 Sum Mean".split()
)
_TERMS = frozenset({"Neg", "Add", "AddV2", "AddN", "Sub"})
_QUOTIENTS = frozenset({"RealDiv", "DivNoNan"})
# What numbers of a batch are computed by.
_OF_SHAPES = frozenset(
    "Const Cast Identity Reshape StridedSlice Prod Mul GatherV2 Pack Squeeze ExpandDims Maximum "
    "Sum Range ConcatV2 Fill BroadcastTo Select SelectV2 Equal NotEqual".split()
)
_SHAPES = frozenset({"Shape", "Size", "Rank", "OnesLike", "ZerosLike"})
# What TensorFlow and Keras call constants that are a shape or a size.
_KNOWN_SHAPE = re.compile("(^|/)(Shape|shape|Size|size|num_elements)(_[0-9]+)?$")

# Tensors by their names and the numbers of dimensions. A sparse tensor has the name of its shape.
Lengths = dict[tuple[str, int], "tf.Tensor | tf.SparseTensor"]


@dataclasses.dataclass
class BatchMeans:
    """Records the means of a graph whose gradients are weighed.

    Attributes:
        weights: of each mean, by what its gradient is multiplied.
        by_length: the weights by the dimensions that are as long.
    """

    weights: dict[tf.Operation, tf.Tensor] = dataclasses.field(default_factory=dict)
    by_length: dict[tuple[str, int], tf.Tensor] = dataclasses.field(default_factory=dict)


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


def taped(target: Any, sources: Any, weights: Any) -> tuple[Any, Any]:
    """Returns what a tape differentiates in a traced function, so that means are weighed.

    To the loss come its means, of each the weight less 1 times what it counts in the loss.

    Args:
        target: what is differentiated, tensors in any structure.
        sources: with respect to what.
        weights: by what the gradients of `target` are multiplied; None: 1.

    Returns:
        Targets and weights.
    """
    graph = tf.get_default_graph()
    losses = tf.nest.flatten(target)
    is_own = cross_replica.is_alone() or not (graphs.is_traced(graph) and graphs.is_outside(graph))
    if is_own or not any(is_variable(x) for x in tf.nest.flatten(sources)):
        return target, weights
    if not all(isinstance(loss, tf.Tensor) for loss in losses):
        return target, weights  # Several tensors in one, such as a tf.RaggedTensor.
    times = [None] * len(losses) if weights is None else tf.nest.flatten(weights)
    means, of_means = [], []
    for loss, each in zip(losses, times):
        for op in _weighed_means(graph, loss):
            mean, weight = op.outputs[0], graph_state.of(graph, BatchMeans).weights[op]
            (share,) = tf.gradients(loss, mean, each)
            if share is not None:  # else it is rounded to whole numbers
                means.append(mean)
                of_means.append(share * tf.cast(weight - 1, share.dtype))
    if not means:
        return target, weights
    times = [tf.ones_like(y) if each is None else each for y, each in zip(losses, times)]
    return [*losses, *means], [*times, *of_means]


def _weighed_means(graph: tf.Graph, target: Any) -> list[tf.Operation]:
    """Returns the means of a loss whose weights are known, once these are noted."""
    analysis, known = analysis_of(graph), graph_state.of(graph, BatchMeans)
    found = []
    for loss in tf.nest.flatten(target):
        if not isinstance(loss, tf.Tensor) or loss.graph is not graph or loss.shape.rank != 0:
            continue
        for mean, weight in _means(loss, analysis, known):
            if not _has_gradient_of_its_own(mean):
                known.weights[mean] = weight
                found.append(mean)
    return found


@tf.RegisterGradient(_GRADIENT)
def _weighed_gradient(op: tf.Operation, gradient: tf.Tensor) -> Any:
    weight = graph_state.of(op.graph, BatchMeans).weights[op]
    return gradient_registry.lookup(op.type)(op, gradient * tf.cast(weight, gradient.dtype))


def _has_gradient_of_its_own(op: tf.Operation) -> bool:
    return _OVERRIDE in op.node_def.attr


def _weight(known: BatchMeans, dimensions: Sequence[Dimension]) -> tf.Tensor | None:
    """Returns N times this rank's share of the records, which one of the dimensions has.

    None: no data are seen that have as many, their first dimension, and are known before ranks
    exchange anything.
    """
    for x, axis in sorted(
        dimensions, key=lambda each: each[0].shape.as_list()[each[1]] is not None
    ):
        alike = _of_same_length(x, axis)
        weight = next((known.by_length[each] for each in alike if each in known.by_length), None)
        if weight is None:
            nearest = _data_among([each for (_, at), each in alike.items() if at == 0])
            if nearest is None:
                continue
            # Not after what a script has its updates wait for, which ranks may exchange.
            with library_operations.noted(x.graph), graphs.outside(), device_scopes.on_host():
                count = tf.shape(nearest, out_type=tf.int64)[0]
                weight = cross_replica.weight_of(count)
        known.by_length.update(dict.fromkeys(alike, weight))
        return weight
    return None


def _means(
    loss: tf.Tensor, analysis: ReplicationAnalysis, known: BatchMeans
) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """Yields the means over the batch on which `loss` depends linearly, and their weights."""
    stack, seen = [loss], set()
    while stack:
        op = stack.pop().op
        if op in seen or op._get_control_flow_context() is not None:
            continue
        seen.add(op)
        weight = _weight(known, _averaged(op, analysis))
        if weight is not None:
            yield op, weight
        elif op.type in _QUOTIENTS:
            if not analysis.is_rank_local([op.inputs[1]]):
                stack.append(op.inputs[0])
        elif op.type == "Mul":
            if any(map(cross_replica.is_weight, op.inputs)):
                continue  # It counts by records already: the loss of `compile`.
            local = [x for x in op.inputs if analysis.is_rank_local([x])]
            stack += local if len(local) == 1 else []
        elif op.type in ("Mean", "Sum") and analysis.is_per_sample([op.inputs[0]]):
            continue
        elif op.type in _LINEAR:
            stack += op.inputs


def _averaged(op: tf.Operation, analysis: ReplicationAnalysis) -> list[Dimension]:
    """Returns the dimensions over which an operation's result is the mean; none if it is none."""
    if op.type == "Mean" and analysis.is_rank_local([op.inputs[0]]):
        return dimension_origins.reduced(op)
    if op.type in _QUOTIENTS:
        over = [dimension_origins.reduced(each) for each in _sums(op.inputs[0], analysis)]
        found = [[each for each in dims if _is_number_of(op.inputs[1], *each)] for dims in over]
        return found[0] if found and all(found) else []
    return []


def _sums(x: tf.Tensor, analysis: ReplicationAnalysis) -> list[tf.Operation]:
    """Returns the sums over what a rank knows that `x` consists of; none if there is more in it."""
    stack, found = [x], []
    while stack:
        op = _passed_on(stack.pop()).op
        local = [each for each in op.inputs if analysis.is_rank_local([each])]
        if op.type in ("Sum", "L2Loss") and local:
            found.append(op)
            continue
        is_multiple = op.type == "Mul" and len(local) == 1
        if not (is_multiple or op.type in _TERMS and len(local) == len(op.inputs)):
            return []
        stack += local
    return found


def _passed_on(x: tf.Tensor) -> tf.Tensor:
    """Returns the number that is passed on as `x`."""
    while x.op.type in ("Identity", "Cast", "Reshape") or (
        x.op.type == "Sum" and x.op.inputs[0].shape.rank == 0
    ):
        x = x.op.inputs[0]
    return x


def _is_number_of(number: tf.Tensor, x: tf.Tensor, axis: int) -> bool:
    """Tells whether a number follows from how many records `x` has, its dimension `axis`.

    It is computed from shapes alone, of what has as many records, and from no other dimension of
    these by itself. TensorFlow writes a shape that it knows as a constant.
    """

    def stop(op: tf.Operation) -> bool:
        return op.type in _SHAPES or bool(_KNOWN_SHAPE.search(op.name) and op.type == "Const")

    walked = graph_analysis.walk([number.op], stop=stop, control=False)
    alike = _of_same_length(x, axis)
    slices = [op for op in walked if op.type in ("StridedSlice", "GatherV2")]
    known = {name for name, at in alike if at == 0 or not slices}
    shapes = [each.shape.as_list() for (_, at), each in alike.items() if at == 0 or not slices]

    def is_of_same(op: tf.Operation) -> bool:
        if op.type in _SHAPES:
            return op.inputs[0].name in known
        value = np.asarray(tf.get_static_value(op.outputs[0])).tolist()
        sizes = [
            shape if isinstance(value, list) else math.prod(shape)
            for shape in shapes
            if None not in shape
        ]
        return value in sizes

    shaped = [op for op in walked if stop(op)]
    return (
        all(op.type in _OF_SHAPES | _SHAPES for op in walked)
        and bool(shaped)
        and all(map(is_of_same, shaped))
        and all(map(_takes_first, slices))
    )


def _takes_first(op: tf.Operation) -> bool:
    """Tells whether a slice of a shape is its first number."""
    begin = tf.get_static_value(op.inputs[1])
    return begin is not None and np.reshape(begin, [-1]).tolist() == [0]


def _of_same_length(
    x: tf.Tensor, axis: int, parts: dict[tuple[str, int], Lengths] | None = None
) -> Lengths:
    """Returns the dimensions upstream that grow as dimension `axis` of `x`, the nearest first.

    Args:
        x, axis: the dimension.
        parts: what was returned for the parts of concatenated tensors.
    """
    parts = {} if parts is None else parts
    lookups = {each.out: each.lookup for each in lookups_of(x.graph).written}
    queue: collections.deque[tuple[Any, int]] = collections.deque([(x, axis)])
    found: Lengths = {}
    while queue:
        x, axis = queue.popleft()
        is_sparse = isinstance(x, tf.SparseTensor)
        name = (x.dense_shape if is_sparse else x).name, axis
        if name in found or not x.shape.rank:
            continue
        found[name] = x
        if is_sparse:
            continue
        if x.op in lookups:
            queue += _of_lookup(lookups[x.op], axis)
            continue
        for origins in dimension_origins.origins(x, axis):
            if len(origins) == 1:
                queue += origins
                continue
            for part, at in origins:
                if (part.name, at) not in parts:
                    parts[part.name, at] = _of_same_length(part, at, parts)
            first, *others = [parts[part.name, at] for part, at in origins]
            alike = [name for name in first if all(name in other for other in others)]
            found.update({name: first[name] for name in alike})
    return found


def _of_lookup(lookup: Lookup, axis: int) -> list[tuple[Any, int]]:
    """Returns the dimension of a lookup's ids from which one of its result comes, if any."""
    if lookup.sparse_ids is not None:
        return [(lookup.sparse_ids, 0)] if axis == 0 else []
    rank = lookup.ids.shape.rank
    return [(lookup.ids, axis)] if rank is not None and axis < rank else []


def _data_among(
    tensors: Sequence[tf.Tensor | tf.SparseTensor],
) -> tf.Tensor | tf.SparseTensor | None:
    """Returns the first of some tensors that is known before the gates; None if none is.

    What a run takes or is fed comes before what is computed from such data alone, of a length that
    the graph doesn't give.
    """
    known = [
        (x, op)
        for x in tensors
        if (op := (x.dense_shape if isinstance(x, tf.SparseTensor) else x).op)
        and op._get_control_flow_context() is None
        and not gates_of(op.graph).level(op)
    ]
    for x, op in known:
        if op.type in graph_analysis.SOURCES | graph_analysis.FED and op not in _captured(op.graph):
            return x
    unknown = [(x, op) for x, op in known if x.shape.as_list()[0] is None]
    return next((x for x, op in unknown if _is_of_data(op)), None)


def _captured(graph: tf.Graph) -> set[tf.Operation]:
    """Returns what a function has from outside: variables, and what is the same in all calls."""
    return {inner.op for _, inner in graph.captures} if graphs.is_function(graph) else set()


def _is_of_data(op: tf.Operation) -> bool:
    """Tells whether an operation computes something from data, and from no variable."""
    upstream = graph_analysis.upstream([op])
    types = {each.type for each in upstream}
    is_of_data = any(map(graph_analysis.gives_other_values, types))
    is_of_variables = not types.isdisjoint(graph_analysis.VARIABLE_TYPES)
    return is_of_data and not is_of_variables and upstream.isdisjoint(_captured(op.graph))
