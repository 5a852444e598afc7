"""Makes `tf.metrics` cover all ranks.

A metric's value, and the result of its update, are computed from the sum of the ranks' states.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication.fused_reductions import Reduction, of_all_ranks
from collective.ops.graph import graph_analysis, graph_state, graphs
from collective.replication import eager_states, metric_states
from collective.replication.analysis import has_replicas
from collective.tensorflow_internals.variables import variables

# Names what reduces the states of `tf.metrics`.
SCOPE = "collective/metric"


@dataclasses.dataclass
class OwnUpdates:
    """Records this rank's own updates of metrics, by the operations that return ranks' sums."""

    by_sum: dict[tf.Operation, tf.Operation] = dataclasses.field(default_factory=dict)


def note_update(total: tf.Tensor, own_update: tf.Operation) -> None:
    """Notes that `total` is the sum over ranks of the results of `own_update`."""
    graph_state.of(total.graph, OwnUpdates).by_sum[total.op] = own_update


def aggregate_across_replicas(
    original: Any, metrics_collections: Any, metric_value_fn: Any, *args: Any
) -> Any:
    """Stands in for `metrics_impl._aggregate_across_replicas`: a value comes of sums over ranks.

    Every function of `tf.metrics` makes its value there. The arguments are the metric's variables,
    whose sums take their place. (Or tensors: values of another metric, which are of all ranks
    already.)
    """
    if not has_replicas(tf.get_default_graph()):
        return original(metrics_collections, metric_value_fn, *args)
    with tf.name_scope(SCOPE), tf.control_dependencies(None):
        summed = [
            of_all_ranks(f"{x.op.name}/metric", tf.convert_to_tensor(x), Reduction.SUM)
            if isinstance(x, variables.Variable)
            else x
            for x in tf.nest.flatten(args)
        ]
    return original(metrics_collections, metric_value_fn, *tf.nest.pack_sequence_as(args, summed))


def updated(original: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `state_ops.assign_add` and `scatter_add`: what they return is of all ranks.

    `tf.metrics` updates a state by them. A rank without data, which answers its peers' evaluation,
    adds the state that it has.
    """
    own_update = original(state, *args, **kwargs)
    graph = tf.get_default_graph()
    if not has_replicas(graph):
        return own_update
    states = graphs.outermost(graph).get_collection_ref(tf.GraphKeys.METRIC_VARIABLES)
    if not any(v is state for v in states):
        return own_update
    if not graphs.is_outside(graph):
        tf.logging.warning(
            "The metric '%s' is updated in a branch, a loop or a function: the value that the "
            "update returns there covers only this rank's records. The metric's own value covers "
            "those of all ranks.",
            state.op.name,
        )
        return own_update
    own_update = tf.convert_to_tensor(own_update)
    # The sum waits for nothing but what the update waits for.
    with tf.name_scope(SCOPE), tf.control_dependencies(None):
        current = tf.convert_to_tensor(state)
        total = of_all_ranks(f"{state.op.name}/updated", own_update, Reduction.SUM, current)
    note_update(total, own_update.op)
    return total


def add_weight(original: Any, metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `Metric.add_weight`: Keras puts the variables of metrics in no collection."""
    variable = original(metric, *args, **kwargs)
    if tf.executing_eagerly_outside_functions():
        # It isn't made equal on all ranks: each adds its own records.
        variable._collective_equal = True
        eager_states.note(metric, variable)
    else:
        metric_states.note(variable.graph, [variable])
    return variable


def without_sums(update: tf.Operation) -> tf.Operation:
    """Returns an operation that updates metrics as `update` does, without sums over ranks.

    It is for callers that don't read the sums.
    """
    return tf.group(*sorted(_own_updates(update), key=lambda op: op._id))


def _own_updates(update: tf.Operation) -> set[tf.Operation]:
    """Returns this rank's own updates before their sums over ranks."""
    if update.type == "NoOp":
        # A group.
        return {op for part in update.control_inputs for op in _own_updates(part)}
    own_by_sum = graph_state.of(update.graph, OwnUpdates).by_sum
    walked = graph_analysis.walk([update], stop=lambda op: op in own_by_sum or _has_effect(op))
    if any(_has_effect(op) for op in walked if op not in own_by_sum):
        # It does something else, too.
        return {update}
    return {own_by_sum[op] for op in walked if op in own_by_sum} or {update}


def _has_effect(op: tf.Operation) -> bool:
    return bool(
        op.op_def.is_stateful
        or graph_analysis.WRITES.match(op.type)
        or graph_analysis.is_of_carrier(op.type)
    )
