"""Keeps replicated variables equal: rank-local values that are assigned become means over ranks.

Optimizers write gradients, which are reduced already. Everything else that changes a replicated
variable (batch normalisation, averages of a loss, a script's own `tf.assign`, a gradient with noise
added) may depend on this rank's data or random numbers. Such a value is noted where it is written.
Before updates are made, or a session runs, the noted values get as few allreduces as their
dependences allow.

In a branch a value gets an allreduce immediately, because nothing can be inserted before it later.
Many scripts keep the averages of their own batch normalisation in a `tf.cond` on a fed switch. If
ranks may take different branches, there is no mean, and a warning says so.

Variables that a script says are each rank's own (local variables, those of
`VariableSynchronization.ON_READ`) are left alone, as is a value fed directly, which is the script's
to choose.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination.run_analysis import is_shared
from collective.ops.communication import collectives, dense_allreduce
from collective.ops.communication.gate import GraphGates, gates_of
from collective.ops.counting import counted
from collective.ops.exchange import slice_means
from collective.ops.graph import control_flow, graph_analysis, graphs, seen_operations
from collective.replication.analysis import (
    ReplicationAnalysis,
    has_replicas,
    is_fed,
    local_variables,
    replicated_variables,
)
from collective.replication.pending_syncs import (
    PendingSyncs,
    analysis_of,
    pending_syncs_of,
    sync_pending,
)
from collective.tables.table import in_shard_view, is_replicated
from collective.tensorflow_internals.graphs import record
from collective.tensorflow_internals.variables import variables

ASSIGNS = frozenset(
    {
        "AssignVariableOp",
        "AssignSubVariableOp",
        "AssignAddVariableOp",
        "Assign",
        "AssignSub",
        "AssignAdd",
    }
)
OPTIMIZER_UPDATES = ("ResourceApply", "ResourceSparseApply", "Apply", "SparseApply")

# Parts of messages.
LOCAL = "collections=[tf.GraphKeys.LOCAL_VARIABLES]"
MEAN = "It becomes the mean over ranks"
ROWS = (
    "Each of its rows becomes what the rank that has it knows; horovod.tensorflow.allreduce(x) is "
    "the mean of their x"
)
DRIFTS = "Its replicas drift apart, and a checkpoint has rank 0's"


def mean_over_ranks(variable: Any, value: Any) -> Any:
    """Returns the value to write to `variable` instead of `value`.

    That is the mean over ranks, or a tensor that will be the mean once `sync_assignments` was
    called. A value that needs no mean is returned unchanged.
    """
    graph = graphs.outermost(tf.get_default_graph())
    if tf.executing_eagerly():
        is_alone = collectives.size() == 1 or not variable.dtype.is_floating
        if is_alone or not is_replicated(variable):
            return value
        return _mean_eagerly(variable, tf.convert_to_tensor(value))
    if graphs.is_traced(graph) and collectives.size() > 1 and is_replicated(variable):
        return dense_allreduce.over_ranks("written", [(str(variable.name), value)])[0]
    if not has_replicas(graph) or not is_replicated(variable):
        return value
    if any(v is variable for v in local_variables(graph)):
        return value
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    pending = pending_syncs_of(graph)
    if value.op in pending.synced:
        return value
    if value.graph is not graph or value.op._get_control_flow_context() is not None:
        return _mean_on_the_spot(variable, value)
    with tf.init_scope():
        placeholder = tf.identity(value, name="collective/written/value")
    pending.note(placeholder.op, 0, str(variable.op.name))
    pending.averaged.add(graph_analysis.memory(variable))
    return placeholder


def _mean_eagerly(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """Returns the mean over ranks, by a function that is kept for the variable."""
    functions = vars(variable).setdefault("_collective_means", {})
    key = tuple(value.shape.as_list()), value.dtype
    if key not in functions:
        functions[key] = tf2.function(
            lambda x: dense_allreduce.over_ranks("written", [(str(variable.name), x)])[0],
            autograph=False,
        ).get_concrete_function(tf.TensorSpec(value.shape, value.dtype))
    with record.stop_recording():
        mean: tf.Tensor = functions[key](value)
    return mean


# What scripts call


def assign(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a variable's `assign`, `assign_add` and `assign_sub`.

    In branches and functions they write the mean over ranks. Outside of these they are found once
    the graph is there.
    """
    graph = tf.get_default_graph()
    if graphs.is_outside(graph) or not has_replicas(graph):
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    variable, value = list(bound.arguments)[:2]
    bound.arguments[value] = _value_inside(bound.arguments[variable], bound.arguments[value])
    return original(*bound.args, **bound.kwargs)


def assign_table(original: Any, table: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a table's `assign`, `assign_add` and `assign_sub`: warns of rank-local values.

    All ranks pass the same whole value, and each keeps its rows.
    """
    graph = graphs.outermost(tf.get_default_graph())
    is_constant = isinstance(value, (np.ndarray, list, float, int))
    if has_replicas(graph) and not in_shard_view() and not is_constant:
        tensor = tf.convert_to_tensor(value, table.dtype)
        if not is_fed(tensor) and analysis_of(graph).is_rank_local([tensor]):
            _warn(f"The table '{table.op.name}' is assigned what depends on", ROWS)
    return original(table, value, *args, **kwargs)


def sync_gradients(grads_and_vars: Sequence[Any]) -> list[Any]:
    """Returns gradients; those of replicated variables are made the same on all ranks.

    A gradient that was reduced may have become rank-local since (a script adds noise), or it never
    was reduced: it becomes the mean over ranks. A sparse one whose rows are each rank's own does so
    by `slice_means.mean_slices`.
    """
    graph = tf.get_default_graph()
    synced = list(grads_and_vars)
    if not has_replicas(graph):
        return synced
    analysis = analysis_of(graph)
    if not graphs.is_outside(graph):
        if _ranks_may_diverge(analysis):
            first = synced[0][1].op.name
            _warn(f"Variables ('{first}' and others) are updated in a branch that", DRIFTS)
        return synced
    sparse = []
    for i, (gradient, variable) in enumerate(synced):
        if is_replicated(variable) and _is_rank_local(gradient, analysis):
            _warn(f"The gradient of the replicated variable '{variable.op.name}' depends on", MEAN)
            if isinstance(gradient, tf.IndexedSlices) and analysis.is_rank_local(
                [gradient.indices]
            ):
                sparse.append(i)
            else:
                synced[i] = _mean_gradient(gradient, variable), variable
    sparse.sort(key=lambda i: str(synced[i][1].name))
    everyones = [(str(synced[i][1].name), synced[i][0]) for i in sparse]
    for i, slices in zip(sparse, slice_means.mean_slices(everyones)):
        synced[i] = slices, synced[i][1]
    return synced


def mean_matrix(gradient: Any, table: Any) -> Any:
    """Returns a table's gradient [V, D], the same on all ranks: the mean over ranks if it isn't."""
    graph = tf.get_default_graph()
    matrix = tf.convert_to_tensor(gradient, table.dtype.base_dtype)
    if not has_replicas(graph) or is_fed(matrix):
        return matrix
    analysis = analysis_of(graphs.outermost(graph))
    if not analysis.is_rank_local([matrix]):
        return matrix
    _warn(f"The gradient of the table '{table.op.name}' depends on", MEAN)
    return dense_allreduce.over_ranks("dense_gradients", [(str(table.op.name), matrix)])[0]


def _is_rank_local(gradient: Any, analysis: ReplicationAnalysis) -> bool:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    tensors = [gradient.values, gradient.indices] if is_sparse else [gradient]
    return isinstance(tensors[0], tf.Tensor) and analysis.is_rank_local(tensors)


def _mean_gradient(gradient: Any, variable: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return mean_over_ranks(variable, gradient)
    values = mean_over_ranks(variable, gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


# In branches, loops and functions


def _value_inside(variable: Any, value: Any) -> Any:
    """Returns what is to be assigned to `variable` in a branch or a function."""
    if not isinstance(variable, (variables.Variable, tf.Tensor)):
        # A partitioned variable, whose parts come here by themselves.
        return value
    memory = graph_analysis.holder(variable.handle if hasattr(variable, "handle") else variable)
    for replicated in replicated_variables(graphs.outermost(tf.get_default_graph())):
        if graph_analysis.memory(replicated) is memory:
            value = tf.convert_to_tensor(value, replicated.dtype.base_dtype)
            return value if is_fed(value) else _mean_on_the_spot(replicated, value)
    return value


def _mean_on_the_spot(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """Returns the mean over ranks in a branch, a loop or a function, if all ranks execute it.

    If they don't, or if there is no mean, it warns and returns `value`, as it does without a
    warning where `value` is the same on all ranks.
    """
    pending, analysis = pending_syncs_of(value.graph), analysis_of(value.graph)
    diverges = _ranks_may_diverge(analysis)
    if not diverges and not analysis.is_rank_local([value]):
        return value
    if diverges or None in control_flow.deciders():
        _warn_of_drift(
            variable, "in a loop, a function, or a branch that a rank takes by itself, and"
        )
        return value
    if (
        not value.dtype.is_floating
        or analysis.is_per_sample([value])
        or not variable.shape.is_fully_defined()
    ):
        _warn_of_drift(variable, f"by '{value.op.name}', which has no mean over ranks, and")
        return value
    mean = dense_allreduce.over_ranks("written", [(str(variable.name), value)])[0]
    pending.synced.add(mean.op)
    return mean


def _ranks_may_diverge(analysis: ReplicationAnalysis) -> bool:
    """Tells whether ranks may take different branches to where the graph is being built."""
    deciders = [tf.convert_to_tensor(x) for x in control_flow.deciders() if x is not None]
    if not deciders:
        return False
    if analysis.is_rank_local(deciders):
        return True
    # Assignments that were written before may have changed what decides.
    graph = graphs.outermost(tf.get_default_graph())
    pending, operations = pending_syncs_of(graph), graph.get_operations()
    new = operations[pending.scanned_operations :]
    pending.scanned_operations = len(operations)
    for _, variable in _rank_local_writes(graph, new):
        pending.changed_locally.add(graph_analysis.memory(variable))
    if not pending.changed_locally:
        return False
    drifting = pending.drifting | pending.changed_locally
    then = ReplicationAnalysis(graph, pending.synced, drifting, pending.averaged)
    return then.is_rank_local(deciders)


# Outside of these


def sync_assignments(graph: tf.Graph, training: bool = False) -> None:
    """Finds what was assigned since the last call, and exchanges everything that must become a
    mean.

    Args:
        graph: the graph, to which a session or an optimizer comes.
        training: whether updates are being made, so that ranks train the graph together.

    Raises:
        NotImplementedError: a session has run it already.
    """
    graph = graphs.outermost(graph)
    if has_replicas(graph) and (training or is_shared(graph)):
        _note_assignments(graph, pending_syncs_of(graph))
        sync_pending(graph)


def sync_update_ops(gates: GraphGates) -> None:
    """Syncs what `tf.GraphKeys.UPDATE_OPS` assign, just before updates are made of gradients.

    The operations wait for the gate, too, as far as it doesn't wait for them.

    Raises:
        NotImplementedError: one of them writes what has no mean (integers, some elements only), or
            was run already.
    """
    graph = tf.get_default_graph()
    if collectives.size() == 1 or graphs.is_function(graph):
        return
    update_ops = _update_ops(graph)
    before_gates, pending = _before_gates(graph), pending_syncs_of(graph)
    new = _carried_out_by(update_ops) - before_gates - pending.synced
    for op, variable in _rank_local_writes(graph, new):
        _refuse_update_op(graph, op, variable)
        pending.note(op, 1, str(variable.name))
    sync_assignments(graph, training=True)
    for op in update_ops:
        if (
            gates.gates
            and gates.level(op) == 0
            and op not in before_gates
            and op._get_control_flow_context() is None
        ):
            op._add_control_input(gates.gates[0].zero.op)
    gates.changed()


def _refuse_update_op(graph: tf.Graph, op: tf.Operation, variable: Any) -> None:
    """Refuses one of `tf.GraphKeys.UPDATE_OPS` whose value can't become a mean."""
    if not _has_mean(op, variable):
        raise NotImplementedError(
            f"'{op.name}' ({op.type}), one of tf.GraphKeys.UPDATE_OPS, changes the replicated "
            f"variable '{variable.op.name}' by what this rank alone knows: its replicas would "
            "drift apart. Assign floating-point values, which become the mean over ranks; or make "
            f"it each rank's own, a local variable: {LOCAL}."
        )
    if op._id <= seen_operations.last(graph):
        raise NotImplementedError(
            f"A session had run '{op.name}' before it was one of tf.GraphKeys.UPDATE_OPS: what it "
            f"writes to '{variable.op.name}' would stay this rank's own. Add it before the first "
            "run."
        )


def _note_assignments(graph: tf.Graph, pending: PendingSyncs) -> None:
    """Notes what was assigned since the last call; in branches `assign` has already handled it."""
    # Before nearly every step the graph is as it was.
    if graph.version == pending.scanned_version or not is_shared(graph):
        return
    operations = graph.get_operations()
    listed = graph_analysis.upstream(_update_ops(graph))
    # A queue is filled by a thread of its own, while training waits for it.
    enqueuing = graph_analysis.upstream(op for op in operations if "Enqueue" in op.type)
    too_early = _before_gates(graph) | enqueuing
    new = {op for op in operations if op._id > pending.scanned_version + 1} - pending.synced
    pending.scanned_version = graph.version
    analysis, updated = analysis_of(graph), []
    for op, variable in _rank_local_writes(graph, new):
        if op.type.startswith(OPTIMIZER_UPDATES):
            updated.append(variable)
            continue
        if is_fed(op.inputs[1]):
            continue
        can_wait = _has_mean(op, variable) and op not in too_early
        if op in listed and can_wait:
            pending.note(op, 1, str(variable.name))
        elif (
            not can_wait
            or op._id <= seen_operations.last(graph)
            or analysis.is_per_sample(op.inputs[1:])
        ):
            reason = f"by '{op.name}' ({op.type}), which has no mean over ranks, and"
            _warn_of_drift(variable, reason)
        else:
            name = variable.op.name
            _warn(
                f"The replicated variable '{name}' is changed by '{op.name}', which depends on",
                MEAN,
            )
            pending.note(op, 1, str(variable.name))
    if updated:
        pending.drifting.update(map(graph_analysis.memory, updated))
        _warn(
            "The update, at a rate or otherwise, of "
            f"{counted(len(updated), 'replicated variable')} ('{updated[0].op.name}' is one) "
            "depends on",
            DRIFTS,
        )


def _update_ops(graph: tf.Graph) -> list[tf.Operation]:
    collected = graph.get_collection(tf.GraphKeys.UPDATE_OPS)
    operations = [getattr(x, "op", x) for x in collected]
    return [op for op in operations if isinstance(op, tf.Operation)]


def _carried_out_by(update_ops: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns `update_ops` and what they only stand for: a group, or a read after a change."""
    return graph_analysis.walk(
        update_ops,
        lambda op: [x.op for x in op.inputs] if op.type == "Identity" else [],
        stop=lambda op: bool(graph_analysis.WRITES.match(op.type)),
    )


def _before_gates(graph: tf.Graph) -> set[tf.Operation]:
    """Returns what the gates wait for, and which can't wait for them."""
    return graph_analysis.upstream(check.bounds.op for check in gates_of(graph).checks)


def _rank_local_writes(
    graph: tf.Graph, operations: Iterable[tf.Operation]
) -> list[tuple[tf.Operation, Any]]:
    """Returns the operations that write rank-local values to replicated variables.

    Operations in branches, and initializers, are left out.

    Returns:
        Pairs of an operation and the variable, in the order in which the operations were made.
    """
    variables_by_memory = {graph_analysis.memory(v): v for v in replicated_variables(graph)}
    initializers = {v.initializer for v in variables_by_memory.values()}
    # Also those that others have replaced.
    initializer_names = {f"{v.op.name}/Assign" for v in variables_by_memory.values()}
    analysis, writes = analysis_of(graph), []
    candidates = [op for op in operations if op.inputs and graph_analysis.WRITES.match(op.type)]
    for op in sorted(candidates, key=lambda op: op._id):
        variable = variables_by_memory.get(op.inputs[0].op)
        if variable is None or op in initializers or op.name in initializer_names:
            continue
        if op._get_control_flow_context() is None and analysis.is_rank_local(op.inputs[1:]):
            writes.append((op, variable))
    return writes


def _has_mean(op: tf.Operation, variable: Any) -> bool:
    return (
        op.type in ASSIGNS
        and bool(variable.dtype.base_dtype.is_floating)
        and bool(variable.shape.is_fully_defined())
    )


# Warnings


def _warn_of_drift(variable: Any, reason: str) -> None:
    """Warns, once for each variable, that its replicas drift apart."""
    drifting = pending_syncs_of(variable.graph).drifting
    memory = graph_analysis.memory(variable)
    if memory not in drifting:
        drifting.add(memory)
        _warn(
            f"The replicated variable '{variable.op.name}' is changed {reason} depends on", DRIFTS
        )


def _warn(cause: str, consequence: str) -> None:
    if collectives.rank() == 0:
        tf.logging.warning(
            f"{cause} what each rank alone knows (its data, its random numbers). {consequence}. A "
            f"variable that is meant to be each rank's own is a local one: {LOCAL}."
        )
