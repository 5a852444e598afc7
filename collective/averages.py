"""Moving averages of what ranks see apart: each step all ranks take the mean of their values, so the averages stay alike.

That is the rule for batch normalisation (each rank normalises by its own batch, and all keep one average), for whatever else a
model adds to `tf.GraphKeys.UPDATE_OPS`, and for `tf.train.ExponentialMovingAverage` of tensors. Averages of variables need no
exchange: replicated ones are alike already, and those of a table are sharded as it is.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variables

from collective import means
from collective.ops import communication
from collective.ops.gate import GraphGates
from collective.ranks import runs
from collective.replicated import is_replicated
from collective.tables import whole
from collective.tables.table import Sharded, shard_view

ASSIGNS = frozenset({'AssignVariableOp', 'AssignSubVariableOp', 'AssignAddVariableOp', 'Assign', 'AssignSub', 'AssignAdd'})


def hold_updates(gates: GraphGates) -> None:
    """Before updates are made: those of `tf.GraphKeys.UPDATE_OPS` wait for the gate, too, as far as it doesn't wait for them,
    and what they assign to replicated variables becomes the mean over ranks."""
    held = [x.op if isinstance(x, tf.Tensor) else x for x in tf.get_collection(tf.GraphKeys.UPDATE_OPS)
            if isinstance(x, (tf.Operation, tf.Tensor))]
    if communication.size() == 1 or not held:
        return
    needed = runs.upstream(check.bounds.op for check in gates.checks)
    _average([op for op in _assignments(held) if op not in needed])
    gates.changed()
    for op in held:
        if gates.gates and gates.level(op) == 0 and op not in needed and op._get_control_flow_context() is None:
            op._add_control_input(gates.gates[0].zero.op)


def _assignments(held: Iterable[tf.Operation]) -> list[tf.Operation]:
    """What `held` assigns to replicated floating-point variables, in the order of the variables' names."""
    holders = {(v.handle if hasattr(v, 'handle') else v).op: str(v.name) for v in tf.global_variables()
               if isinstance(v, variables.Variable) and is_replicated(v) and v.dtype.base_dtype.is_floating}
    found = [op for op in runs.upstream(held) if op.type in ASSIGNS and op._get_control_flow_context() is None
             and op.inputs[0].op in holders]
    return sorted(found, key=lambda op: (holders[op.inputs[0].op], str(op.name)))


def _average(assignments: list[tf.Operation]) -> None:
    known = _averaged(tf.get_default_graph())
    new = [op for op in assignments if op not in known and tf.get_static_value(op.inputs[1]) is None]
    if not new:
        return
    with tf.init_scope(), tf.name_scope('collective/moving_averages/'):
        averaged = means.over_ranks('moving_averages', [(str(op.inputs[0].op.name), op.inputs[1]) for op in new])
    for op, mean in zip(new, averaged):
        op._update_input(1, mean)
    known.update(new)


def assign_moving_average(original: Any, variable: Any, value: Any, decay: Any, *args: Any, **kwargs: Any) -> Any:
    """`moving_averages.assign_moving_average`: of a tensor, towards the mean of the ranks' tensors."""
    graph = tf.get_default_graph()
    inside = hasattr(graph, 'outer_graph') or graph._get_control_flow_context() is not None
    if communication.size() == 1 or inside or not (isinstance(value, tf.Tensor) and is_replicated(variable)):
        return original(variable, value, decay, *args, **kwargs)
    mean = means.over_ranks('moving_averages', [(str(variable.op.name), value)])[0]
    out = original(variable, mean, decay, *args, **kwargs)
    _averaged(graph).update(op for op in graph.get_operations() if op._id > mean.op._id and op.type in ASSIGNS)
    return out


def _averaged(graph: tf.Graph) -> set[tf.Operation]:
    """The assignments of `graph` whose values are means already."""
    if not hasattr(graph, '_collective_averaged'):
        graph._collective_averaged = set()
    found: set[tf.Operation] = graph._collective_averaged
    return found


def apply_average(original: Any, average: Any, var_list: Any = None) -> tf.Operation:
    """`ExponentialMovingAverage.apply`: the average of a table is sharded as the table is, and looked up as one."""
    listed = tf.trainable_variables() if var_list is None else list(var_list)
    tables = [v for v in listed if isinstance(v, Sharded)]
    for table in tables:
        if table.rows is None:
            table.refuse('tf.train.ExponentialMovingAverage')
    if communication.size() == 1 or not tables:
        return original(average, var_list)
    with tf.control_dependencies([whole.agreed(tables[0], average.name)]), shard_view():
        return original(average, listed)
