"""Tells on which tables a script's tensors depend, as if each lookup had its own exchange.

Lookups of a group share operations. To TensorFlow a loss that uses rows of one of their tables is
connected to all of them, and its gradient with respect to the others is zero, where the script's
own graph has none. An optimizer makes slots for a gradient of zeros, and Adam moves rows by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis
from collective.tables.grouping import WrittenLookup, lookups_of

# Of other types, such as ids, there are no gradients.
_PASSING = (tf.resource, tf.variant)


def without_others(
    graph: tf.Graph, ys: Any, xs: Sequence[Any], gradients: Iterable[Any]
) -> list[Any]:
    """Returns the gradients, with None for those that are there only because lookups share a group.

    Args:
        graph: of the tensors.
        ys: what was differentiated, tensors in any structure.
        xs: with respect to what.
        gradients: those that TensorFlow has found, one for each of `xs`.
    """
    gradients = list(gradients)
    written = {each.out: each for each in lookups_of(graph).written if each.group is not None}
    tables = {id(each.lookup.table) for each in written.values()}
    weights = [each.lookup.sparse_weights for each in written.values()]
    weighing = graph_analysis.upstream(x.values.op for x in weights if x is not None)
    doubtful = [
        i
        for i, x in enumerate(xs)
        if gradients[i] is not None and (id(x) in tables or not weighing.isdisjoint(_operations(x)))
    ]
    if not doubtful:
        return gradients
    reached = graph_analysis.walk(
        [op for y in tf.nest.flatten(ys) for op in _operations(y)],
        lambda op: _producers(op, written.get(op)),
        lambda op: op.type == "StopGradient",
        control=False,
    )
    looked_up = {id(each.lookup.table) for out, each in written.items() if out in reached}
    for i in doubtful:
        if id(xs[i]) not in looked_up and reached.isdisjoint(_operations(xs[i])):
            gradients[i] = None
    return gradients


def _producers(op: tf.Operation, lookup: WrittenLookup | None) -> Iterator[tf.Operation]:
    """Yields the operations whose results a gradient passes on to, from `op`.

    From a lookup it goes to the weights of its samples; what is above its table is the table.
    """
    inputs: Iterable[tf.Tensor] = op.inputs
    if lookup is not None:
        weights = lookup.lookup.sparse_weights
        inputs = () if weights is None else (weights.values,)
    for x in inputs:
        kind = x.dtype.base_dtype
        if kind.is_floating or kind.is_complex or kind in _PASSING:
            yield x.op


def _operations(x: Any) -> list[tf.Operation]:
    """Returns the operations of a tensor or of what consists of some, or that of a variable."""
    handle = getattr(x, "handle", None)
    tensors = tf.nest.flatten(x, expand_composites=True) if handle is None else [handle]
    return [tensor.op for tensor in tensors if tensor is not None]
