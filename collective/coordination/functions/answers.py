"""Lets a rank that is out of data answer its peers' evaluation by a `tf.function`.

It calls another function, with the same exchanges and no ids: the peers' rows come from its shards,
and so do their sums of a table's squares (`tf.nn.l2_loss`, by which Keras regularizes). To what the
ranks add up of their batches it adds zeros; metrics count nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import strategies
from collective.coordination import run_analysis
from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.graph import graph_state
from collective.strategies.grouped_exchange import groups_of
from collective.tables import dense_view, traced_lookups
from collective.tables.grouping import group_traced


def answer_of(graph: tf.Graph, shared: tuple[str, ...]) -> Any:
    """Returns a function that answers one call of a traced function; None if there is none.

    Args:
        graph: of the function, which updates nothing.
        shared: the names of everything that all ranks run in a call.
    """
    groups = list(groups_of(graph))
    squares = list(graph_state.of(graph, dense_view.Squares).made)
    sums = {
        name: tensors
        for name, tensors in gates_of(graph).sums.items()
        if not {name, f"{name}.parts"}.isdisjoint(shared)  # the second of a sum in order
    }
    made: list[tf.Graph] = []

    @tf2.function(autograph=False)
    def answer(opened: tf.Tensor) -> list[tf.Tensor]:
        inner = tf.get_default_graph()
        made.append(inner)
        # The ranks have agreed outside of the call.
        gates_of(inner).at(1).zero.op._update_input(0, opened)
        outs = []
        for group in groups:
            outs += [
                traced_lookups.stand_in(_without_ids(member.lookup), None)
                for member in group.members
            ]
            group_traced(inner)
        for name, tensors in sums.items():
            zeros = [tf.zeros(x.shape, x.dtype) for x in tensors]
            outs += collectives.allreduce_sum(zeros, name, gates_of(inner).at(1).zero)
        return outs + [dense_view.l2_loss(table) for table, _ in squares]

    function = answer.get_concrete_function(tf2.TensorSpec([], tf.int32))
    answered = run_analysis.shared_names(made[-1], set(made[-1].get_operations()), ())
    names = {name for name in answered if name.startswith(collectives.PREFIX)}
    if {name for name in shared if name.startswith(collectives.PREFIX)} != names:
        return None  # It has other collectives, which need values.
    return function


def _without_ids(lookup: strategies.Lookup) -> strategies.Lookup:
    """Returns a lookup like `lookup` of nothing, as part of the function that is being traced."""

    def empty(like: tf.SparseTensor) -> tf.SparseTensor:
        return tf.SparseTensor(
            tf.zeros([0, 2], tf.int64), tf.zeros([0], like.dtype), tf.zeros([2], tf.int64)
        )

    if lookup.sparse_ids is None:
        return dataclasses.replace(lookup, ids=tf.zeros([0], tf.int64))
    ids, weights = empty(lookup.sparse_ids), lookup.sparse_weights
    return dataclasses.replace(
        lookup,
        ids=tf.zeros([0], tf.int64),
        sparse_ids=ids,
        sparse_weights=None if weights is None else empty(weights),
    )
