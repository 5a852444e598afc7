"""`tf.metrics` over all ranks: a metric's value, and what its update returns, are those of the
ranks' states added up.
"""

from __future__ import annotations

import collections
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variables

from collective.ops import collectives, gate, graph_analysis, graphs
from collective.ops.graph_state import state_of


def aggregate_across_replicas(
    original: Any, metrics_collections: Any, metric_value_fn: Any, *args: Any
) -> Any:
    """`metrics_impl._aggregate_across_replicas`, through which every function of `tf.metrics` makes
    its value.

    Its arguments are the metric's variables, whose sums over ranks take their place. (Or tensors:
    values of another metric, which are of all ranks already.)
    """
    if not _concerns(tf.get_default_graph()):
        return original(metrics_collections, metric_value_fn, *args)
    flat = tf.nest.flatten(args)
    with tf.name_scope("collective/metric"), tf.control_dependencies(None):
        summed = iter(_sums([x for x in flat if isinstance(x, variables.Variable)]))
    whole = [next(summed) if isinstance(x, variables.Variable) else x for x in flat]
    return original(metrics_collections, metric_value_fn, *tf.nest.pack_sequence_as(args, whole))


def _concerns(graph: tf.Graph) -> bool:
    """Whether ranks have metrics in `graph` together: not if it is built to be served."""
    return (
        collectives.size() > 1
        and not tf.executing_eagerly()
        and state_of(graphs.outermost(graph)).served_from is None
    )


def updated(original: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """`state_ops.assign_add` and `scatter_add`, by which `tf.metrics` updates a state: what they
    return is of all ranks.

    A rank without data, which answers its peers' evaluation, adds the state that it has.
    """
    mine = original(state, *args, **kwargs)
    graph = tf.get_default_graph()
    if not _concerns(graph) or not any(
        v is state
        for v in graphs.outermost(graph).get_collection_ref(tf.GraphKeys.METRIC_VARIABLES)
    ):
        return mine
    if not graphs.is_outside(graph):
        tf.logging.warning(
            "The metric '%s' is updated in a branch, a loop or a function: what "
            "the update returns there is of "
            "this rank's records alone. The metric's value is of all ranks'.",
            state.op.name,
        )
        return mine
    mine = tf.convert_to_tensor(mine)
    # none but what `mine` waits for
    with tf.name_scope("collective/metric"), tf.control_dependencies(None):
        given, now = tf.placeholder_with_default(mine, mine.shape), tf.convert_to_tensor(state)
        gates, name = gate.gates_of(graph), collectives.unique_name(f"{state.op.name}/updated")
        total = collectives.allreduce_sum([given], name, gates.beside([mine]).zero)[0]
    # (`allreduce_sum` takes two collectives where it must add up in order.)
    gates.states[f"{name}.parts" if collectives.in_order() else name] = (given, now)
    _updates(graph)[total.op] = mine.op
    return total


def _updates(graph: tf.Graph) -> dict[tf.Operation, tf.Operation]:
    """By the operations that give sums over ranks, this rank's own updates before them."""
    return state_of(graph).metric_updates


def without_sums(update: tf.Operation) -> tf.Operation:
    """What updates metrics as `update` does, but for sums over ranks that nobody looks at."""
    return tf.group(*sorted(_without_sums(update), key=lambda op: op._id))


def _without_sums(update: tf.Operation) -> set[tf.Operation]:
    if update.type == "NoOp":  # a group
        return {op for part in update.control_inputs for op in _without_sums(part)}
    known, mine, seen, stack = _updates(update.graph), set(), set(), [update]
    while stack:
        op = stack.pop()
        if op in known:
            mine.add(known[op])
        elif op not in seen:
            seen.add(op)
            if (
                op.op_def.is_stateful
                or graph_analysis.WRITES.match(op.type)
                or graph_analysis.is_horovod(op.type)
            ):
                return {update}  # it does something else, too
            stack += [x.op for x in op.inputs] + list(op.control_inputs)
    return mine or {update}


def _sums(states: list[Any]) -> list[tf.Tensor]:
    by_dtype: dict[tf.DType, list[int]] = collections.defaultdict(list)
    for i, state in enumerate(states):
        by_dtype[state.dtype.base_dtype].append(i)
    out: list[Any] = [None] * len(states)
    for which in by_dtype.values():
        values = [tf.convert_to_tensor(states[i]) for i in which]
        name = collectives.unique_name(f"{states[which[0]].op.name}/metric")
        opened = gate.gates_of(tf.get_default_graph()).beside(values).zero
        for i, total in zip(which, collectives.allreduce_sum(values, name, opened)):
            out[i] = total
    return out
