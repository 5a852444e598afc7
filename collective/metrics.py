"""`tf.metrics` over all ranks: a metric's value is that of the ranks' states added up, its update is this rank's own."""
from __future__ import annotations

import collections
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variables

from collective.ops import communication, gate


def aggregate_across_replicas(original: Any, metrics_collections: Any, metric_value_fn: Any, *args: Any) -> Any:
    """`metrics_impl._aggregate_across_replicas`, through which every function of `tf.metrics` makes its value.

    Its arguments are the metric's variables, whose sums over ranks take their place. (Or tensors: values of another metric,
    which are of all ranks already.)
    """
    if communication.size() == 1 or tf.executing_eagerly():
        return original(metrics_collections, metric_value_fn, *args)
    flat = tf.nest.flatten(args)
    with tf.name_scope('collective/metric'), tf.control_dependencies(None):
        summed = iter(_sums([x for x in flat if isinstance(x, variables.Variable)]))
    whole = [next(summed) if isinstance(x, variables.Variable) else x for x in flat]
    return original(metrics_collections, metric_value_fn, *tf.nest.pack_sequence_as(args, whole))


def _sums(states: list[Any]) -> list[tf.Tensor]:
    by_dtype: dict[tf.DType, list[int]] = collections.defaultdict(list)
    for i, state in enumerate(states):
        by_dtype[state.dtype.base_dtype].append(i)
    out: list[Any] = [None] * len(states)
    for which in by_dtype.values():
        values = [tf.convert_to_tensor(states[i]) for i in which]
        name = communication.unique_name(f'{states[which[0]].op.name}/metric')
        opened = gate.gates_of(tf.get_default_graph()).beside(values).zero
        for i, total in zip(which, communication.allreduce_sum(values, name, opened)):
            out[i] = total
    return out
