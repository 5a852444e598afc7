"""Tells how many records a rank's batch has, by a dimension of a tensor or by a number.

A dimension of what is computed from a batch is followed to the data that it comes from; a number,
to the shapes that it is computed from. Ranks say how many records these data have when they agree
on a run: the weight of a rank is N times its share of all.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

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
from collective.strategies import Lookup
from collective.tables.grouping import lookups_of

# Up to here a constant may be added to a number of records, against a division by 0.
_NEGLIGIBLE = 1e-3
# What numbers of a batch are computed by.
_OF_SHAPES = frozenset(
    "Const Cast Identity Reshape StridedSlice Prod Mul GatherV2 Pack Squeeze ExpandDims Maximum "
    "Sum Range ConcatV2 Fill BroadcastTo Select SelectV2 Equal NotEqual Unpack Split".split()
)
_SLICES = frozenset({"StridedSlice", "GatherV2", "Unpack", "Split"})
_SHAPES = frozenset({"Shape", "Size", "Rank", "OnesLike", "ZerosLike"})
# What TensorFlow and Keras call constants that are a shape or a size.
_KNOWN_SHAPE = re.compile("(^|/)(Shape|shape|Size|size|num_elements)(_[0-9]+)?$")

# Tensors by their names and the numbers of dimensions. A sparse tensor has the name of its shape.
Lengths = dict[tuple[str, int], "tf.Tensor | tf.SparseTensor"]


@dataclasses.dataclass
class RecordWeights:
    """Records the weights of a graph's batches.

    Attributes:
        by_length: the weights by the dimensions that are as long as a batch; the weight of a
            product by the names of its data, joined.
    """

    by_length: dict[tuple[str, int], tf.Tensor] = dataclasses.field(default_factory=dict)


def weight_of(
    graph: tf.Graph, dimensions: Sequence[Dimension], may_exchange: bool = True
) -> tf.Tensor | None:
    """Returns N times this rank's share of the records, which one of the dimensions has.

    If several come from different data, as where candidates meet records, it is the share of their
    product. None: no data are seen that have as many, their first dimension, and are known before
    ranks exchange anything.

    Args:
        graph: that of the dimensions.
        dimensions: those of what is counted.
        may_exchange: whether the weight is worth an exchange: ranks say only one number when they
            agree on a run.
    """
    known = graph_state.of(graph, RecordWeights).by_length
    data: list[tf.Tensor | tf.SparseTensor] = []  # from which the dimensions come
    of_all: Lengths = {}
    for x, axis in sorted(
        dimensions, key=lambda each: each[0].shape.as_list()[each[1]] is not None
    ):
        alike = _of_same_length(x, axis)
        nearest = _data_among([each for (_, at), each in alike.items() if at == 0])
        is_counted = nearest is not None or not known.keys().isdisjoint(alike)
        if is_counted and of_all.keys().isdisjoint(alike):
            data += [] if nearest is None else [nearest]
            of_all.update(alike)
    if len(data) > 1:  # each with each: as many as one has times the other
        of_all = {("*".join(sorted(_name(each) for each in data)), 0): data[0]}
    weight = next((known[each] for each in of_all if each in known), None)
    if weight is None:
        if not data or not may_exchange and _are_said(graph):
            return None
        # Not after what a script has its updates wait for, which ranks may exchange.
        with library_operations.noted(graph), graphs.outside(), device_scopes.on_host():
            sizes = [tf.shape(each, out_type=tf.int64)[0] for each in data]
            weight = cross_replica.weight_of(sizes[0] if len(sizes) == 1 else tf.reduce_prod(sizes))
    known.update(dict.fromkeys(of_all, weight))
    return weight


def _name(x: tf.Tensor | tf.SparseTensor) -> str:
    """Returns the name by which the lengths of a tensor are known."""
    return str((x.dense_shape if isinstance(x, tf.SparseTensor) else x).name)


def _are_said(graph: tf.Graph) -> bool:
    """Tells whether ranks say already how many of some records they have."""
    return gates_of(graph).at(1).records is not None


def is_number_of(number: tf.Tensor, x: tf.Tensor, axis: int) -> bool:
    """Tells whether a number follows from how many records `x` has, its dimension `axis`.

    It is computed from shapes alone, of what has as many records, and from no other dimension of
    these by itself. TensorFlow writes a shape that it knows as a constant.
    """
    walked = _shapes_of(number)
    alike = _of_same_length(x, axis)
    slices = [op for op in walked if op.type in _SLICES]
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

    shaped = [op for op in walked if _is_shape(op)]
    is_first = all(_takes_first(op, number, walked) for op in slices)
    return bool(shaped) and is_first and all(map(is_of_same, shaped))


def counted(number: tf.Tensor) -> Dimension | None:
    """Returns the dimension of data of which a number is the length, or a multiple of it.

    A sum over anything else is divided by it, too: on all ranks the sums are divided by the sum of
    these numbers.
    """
    walked = _shapes_of(number)
    shaped = {op.inputs[0].name: op.inputs[0] for op in walked if op.type in _SHAPES}
    slices = [op for op in walked if op.type in _SLICES]
    if len(shaped) != 1 or not slices:
        return None
    if not all(_takes_first(op, number, walked) for op in slices):
        return None
    (x,) = shaped.values()
    return (x, 0) if x.shape.rank else None


def _shapes_of(number: tf.Tensor) -> list[tf.Operation]:
    """Returns what a number is computed by, up to shapes; [] if by anything else."""
    walked = graph_analysis.walk([number.op], stop=_is_shape, control=False)
    is_of_shapes = all(
        op.type in _OF_SHAPES | _SHAPES
        or op.type in ("Add", "AddV2")
        and any(_is_negligible(x) for x in op.inputs)
        for op in walked
    )
    return list(walked) if is_of_shapes else []


def _is_shape(op: tf.Operation) -> bool:
    return op.type in _SHAPES or bool(_KNOWN_SHAPE.search(op.name) and op.type == "Const")


def _is_negligible(x: tf.Tensor) -> bool:
    value = tf.get_static_value(x)
    return value is not None and bool((np.abs(value) <= _NEGLIGIBLE).all())


def _takes_first(op: tf.Operation, number: tf.Tensor, walked: Sequence[tf.Operation]) -> bool:
    """Tells whether a slice of a shape, from which `number` is computed, is its first number."""
    if op.type in ("Unpack", "Split"):
        used = [number, *(x for each in walked for x in each.inputs)]
        return all(x.value_index == 0 for x in used if x.op is op)
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
