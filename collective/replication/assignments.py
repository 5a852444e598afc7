"""Replicated variables stay alike: what a rank would write of what it alone knows becomes the mean
over ranks first.

Optimizers write what `gradients` has reduced already. Everything else that changes a replicated
variable (batch normalisation, averages of a loss, a script's own `tf.assign`, a gradient with noise
added) may depend on this rank's data or random numbers. Such a value is noted where it is written;
before updates are made, or a session runs, what was noted gets as few allreduces as its dependences
allow. In a branch or a function it gets one on the spot: nothing can be put in front of it later.

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
from tensorflow.python.ops import variables

from collective.ops import collectives, control_flow, dense_allreduce, graph_analysis, graphs
from collective.ops.gate import GraphGates, gates_of
from collective.ops.graph_state import state_of
from collective.replication.analysis import Search, is_fed, local, replicated
from collective.replication.pending_syncs import PendingSyncs, exchange, search_of, written_in
from collective.tables.table import Table, in_shard_view, is_replicated

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
APPLIES = ("ResourceApply", "ResourceSparseApply", "Apply", "SparseApply")
LOCAL = "collections=[tf.GraphKeys.LOCAL_VARIABLES]"
MEAN = "It becomes the mean over ranks"
ROWS = "Each of its rows becomes what the rank that has it knows; horovod.tensorflow.allreduce(x) is the mean of their x"
DRIFTS = "Its replicas drift apart, and a checkpoint has rank 0's"


def alike(variable: Any, value: Any) -> Any:
    """`value`, a tensor on its way to `variable`, or what will be the mean of it over ranks."""
    graph = graphs.outermost(tf.get_default_graph())
    if (
        not _concerns(graph)
        or not is_replicated(variable)
        or any(v is variable for v in local(graph))
    ):
        return value
    if (
        not isinstance(value, tf.Tensor)
        or not value.dtype.is_floating
        or value.op in written_in(graph).known
    ):
        return value
    if value.graph is not graph or value.op._get_control_flow_context() is not None:
        return _mean_inside(variable, value)
    with tf.init_scope():
        own = tf.identity(value, name="collective/written/value")
    written_in(graph).note(own.op, 0, str(variable.op.name))
    written_in(graph).averaged.add(graph_analysis.memory(variable))
    return own


def _concerns(graph: tf.Graph) -> bool:
    """Whether ranks have variables in `graph` that are to stay alike: not if it is built to be
    served.
    """
    return (
        collectives.size() > 1
        and not tf.executing_eagerly()
        and state_of(graph).served_from is None
    )


def assign(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`assign`, `assign_add` and `assign_sub` of variables: in a branch or a function they write
    the mean over ranks.

    Outside of these they are found once the graph is there.
    """
    graph = tf.get_default_graph()
    if graphs.is_outside(graph) or not _concerns(graphs.outermost(graph)):
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    variable, value = list(given.arguments)[:2]
    given.arguments[value] = _written_inside(given.arguments[variable], given.arguments[value])
    return original(*given.args, **given.kwargs)


def assign_table(original: Any, table: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """`assign` and its like of a table: all ranks give the same whole value, of which each keeps
    its rows.
    """
    graph = graphs.outermost(tf.get_default_graph())
    if (
        _concerns(graph)
        and not in_shard_view()
        and not isinstance(value, (np.ndarray, list, float, int))
    ):
        given = tf.convert_to_tensor(value, table.dtype)
        if not is_fed(given) and search_of(graph).is_own([given]):
            _warn(f"The table '{table.op.name}' is assigned what depends on", ROWS)
    return original(table, value, *args, **kwargs)


def _written_inside(variable: Any, value: Any) -> Any:
    # a partitioned one, whose parts come here by themselves
    if not isinstance(variable, (variables.Variable, tf.Tensor)):
        return value
    memory = graph_analysis.holder(variable.handle if hasattr(variable, "handle") else variable)
    held = next(
        (
            v
            for v in replicated(graphs.outermost(tf.get_default_graph()))
            if graph_analysis.memory(v) is memory
        ),
        None,
    )
    if held is None:
        return value
    value = tf.convert_to_tensor(value, held.dtype.base_dtype)
    return value if is_fed(value) else _mean_inside(held, value)


def _mean_inside(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """In a branch, a loop or a function: the mean over ranks of a value of this rank's own, if all
    ranks come by.
    """
    found, search = written_in(value.graph), search_of(value.graph)
    apart = _come_apart(search)
    if not apart and not search.is_own([value]):
        return value
    if apart or None in control_flow.deciders():
        _drifts(variable, "in a loop, a function, or a branch that a rank takes by itself, and")
        return value
    if (
        not value.dtype.is_floating
        or search.is_of_samples([value])
        or not variable.shape.is_fully_defined()
    ):
        _drifts(variable, f"by '{value.op.name}', which has no mean over ranks, and")
        return value
    mean = dense_allreduce.over_ranks("written", [(str(variable.name), value)])[0]
    found.known.add(mean.op)
    return mean


def _come_apart(search: Search) -> bool:
    """Whether ranks may take different branches to where the graph is being built."""
    deciders = [tf.convert_to_tensor(x) for x in control_flow.deciders() if x is not None]
    if not deciders:
        return False
    if search.is_own(deciders):
        return True
    graph = graphs.outermost(tf.get_default_graph())
    found, everything = written_in(graph), graph.get_operations()
    new, found.looked = everything[found.looked :], len(everything)
    found.changed.update(
        graph_analysis.memory(v)
        for op, v in _writes(graph, (op for op in new if graph_analysis.WRITES.match(op.type)))
    )
    return bool(found.changed) and Search(
        graph, found.known, found.drifting | found.changed, found.averaged
    ).is_own(deciders)


def gradients(grads_and_vars: Sequence[Any]) -> list[Any]:
    """Of replicated variables: those that depend on what this rank alone knows, though they were
    reduced, or never were, become
    the mean over ranks once more: of sparse ones, if the rows are each rank's own, by
        `dense_allreduce.mean_slices`.
    """
    graph = tf.get_default_graph()
    out = list(grads_and_vars)
    if not _concerns(graphs.outermost(graph)):
        return out
    search = search_of(graph)
    if not graphs.is_outside(graph):
        if _come_apart(search):
            _warn(
                f"Variables ('{out[0][1].op.name}' and others) are updated in a branch that", DRIFTS
            )
        return out
    for i, (gradient, variable) in enumerate(out):
        sparse = isinstance(gradient, tf.IndexedSlices)
        values = [gradient.values, gradient.indices] if sparse else [gradient]
        if (
            not isinstance(values[0], tf.Tensor)
            or not is_replicated(variable)
            or not search.is_own(values)
        ):
            continue
        _warn(f"The gradient of the replicated variable '{variable.op.name}' depends on", MEAN)
        if not sparse:
            gradient = alike(variable, gradient)
        elif search.is_own([gradient.indices]):
            gradient = dense_allreduce.mean_slices(gradient, variable)
        else:
            gradient = tf.IndexedSlices(
                alike(variable, gradient.values), gradient.indices, gradient.dense_shape
            )
        out[i] = gradient, variable
    return out


def hold_updates(gates: GraphGates) -> None:
    """Before updates are made: those of `tf.GraphKeys.UPDATE_OPS` wait for the gate, too, as far as
    it doesn't wait for them, and what they assign to replicated variables becomes the mean over
    ranks.

    Raises:
        NotImplementedError: one of them writes what has no mean (integers, some elements only), or
            was run already.
    """
    graph = tf.get_default_graph()
    if collectives.size() == 1 or graphs.is_function(graph):
        return
    held = _update_ops(graph)
    needed, found = _before_gates(graph), written_in(graph)
    for op, variable in _writes(graph, _listed(held) - needed - found.known):
        if not _has_mean(op, variable):
            raise NotImplementedError(
                f"'{op.name}' ({op.type}), one of tf.GraphKeys.UPDATE_OPS, changes the replicated "
                f"variable "
                f"'{variable.op.name}' by what this rank alone knows: its replicas would drift "
                f"apart. Assign floating-point "
                f"values, which become the mean over ranks; or make it each rank's own, a local "
                f"variable: {LOCAL}."
            )
        if op._id <= state_of(graph).seen_by_session:
            raise NotImplementedError(
                f"A session had run '{op.name}' before it was one of tf.GraphKeys.UPDATE_OPS: "
                f"what it writes to "
                f"'{variable.op.name}' would stay this rank's own. Add it before the first run."
            )
        found.note(op, 1, str(variable.name))
    settle(graph, training=True)
    for op in held:
        if (
            gates.gates
            and gates.level(op) == 0
            and op not in needed
            and op._get_control_flow_context() is None
        ):
            op._add_control_input(gates.gates[0].zero.op)
    gates.changed()


def _note_assignments(graph: tf.Graph, found: PendingSyncs) -> None:
    """What was written since the last time; in a branch `assign` has seen to it."""
    # as it was before nearly every step
    if graph.version == found.version or not _is_shared(graph):
        return
    listed, needed = graph_analysis.upstream(_update_ops(graph)), _before_gates(graph)
    everything = graph.get_operations()
    # A queue is filled by a thread of its own, while training waits for it.
    needed |= graph_analysis.upstream(op for op in everything if "Enqueue" in op.type)
    new = {op for op in everything if op._id > found.version + 1} - found.known
    found.version = graph.version
    search, updated = search_of(graph), []
    for op, variable in _writes(graph, {op for op in new if graph_analysis.WRITES.match(op.type)}):
        if op.type.startswith(APPLIES):
            updated.append(variable)
        elif is_fed(op.inputs[1]):
            continue
        elif op in listed and _has_mean(op, variable) and op not in needed:
            found.note(op, 1, str(variable.name))
        elif (
            not _has_mean(op, variable)
            or op in needed
            or op._id <= state_of(graph).seen_by_session
            or search.is_of_samples(op.inputs[1:])
        ):
            _drifts(variable, f"by '{op.name}' ({op.type}), which has no mean over ranks, and")
        else:
            _warn(
                f"The replicated variable '{variable.op.name}' is changed by '{op.name}', which "
                f"depends on",
                MEAN,
            )
            found.note(op, 1, str(variable.name))
    if updated:
        found.drifting.update(map(graph_analysis.memory, updated))
        _warn(
            f"{len(updated)} replicated variables ('{updated[0].op.name}' is one) are updated, "
            f"at a rate or otherwise, by",
            DRIFTS,
        )


def _is_shared(graph: tf.Graph) -> bool:
    """Whether ranks train `graph` together; they may have others by themselves."""
    return bool(gates_of(graph).gates) or any(
        isinstance(v, Table) for v in graph.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES)
    )


def _update_ops(graph: tf.Graph) -> list[tf.Operation]:
    listed = (getattr(x, "op", x) for x in graph.get_collection(tf.GraphKeys.UPDATE_OPS))
    return [op for op in listed if isinstance(op, tf.Operation)]


def _listed(held: Iterable[tf.Operation]) -> set[tf.Operation]:
    """`held`, and what they only stand for: a group, or what is read after a change."""
    stack = list(held)
    found = set(stack)
    while stack:
        op = stack.pop()
        if not graph_analysis.WRITES.match(op.type):
            new = set(op.control_inputs) | (
                {x.op for x in op.inputs} if op.type == "Identity" else set()
            )
            stack.extend(new - found)
            found |= new
    return found


def _drifts(variable: Any, by: str) -> None:
    drifting, memory = written_in(variable.graph).drifting, graph_analysis.memory(variable)
    if memory not in drifting:
        drifting.add(memory)
        _warn(f"The replicated variable '{variable.op.name}' is changed {by} depends on", DRIFTS)


def _warn(what: str, then: str) -> None:
    if collectives.rank() == 0:
        tf.logging.warning(
            f"{what} what each rank alone knows (its data, its random numbers). "
            f"{then}. A variable that is "
            f"meant to be each rank's own is a local one: {LOCAL}."
        )


def _before_gates(graph: tf.Graph) -> set[tf.Operation]:
    """What the gates wait for, and which can't wait for them."""
    return graph_analysis.upstream(check.bounds.op for check in gates_of(graph).checks)


def _writes(graph: tf.Graph, operations: Iterable[tf.Operation]) -> list[tuple[tf.Operation, Any]]:
    """Those of `operations` outside of branches that write a replicated variable, with it, what
    this rank alone knows.
    """
    holders, search = {graph_analysis.memory(v): v for v in replicated(graph)}, search_of(graph)
    # Also the initializers that others were put in the place of.
    initial = {v.initializer for v in holders.values()} | {
        f"{v.op.name}/Assign" for v in holders.values()
    }
    out = []
    for op in sorted(operations, key=lambda op: op._id):
        variable = (
            holders.get(op.inputs[0].op)
            if op.inputs and graph_analysis.WRITES.match(op.type)
            else None
        )
        if (
            variable is not None
            and op not in initial
            and op.name not in initial
            and (op._get_control_flow_context() is None and search.is_own(op.inputs[1:]))
        ):
            out.append((op, variable))
    return out


def _has_mean(op: tf.Operation, variable: Any) -> bool:
    return (
        op.type in ASSIGNS
        and bool(variable.dtype.base_dtype.is_floating)
        and bool(variable.shape.is_fully_defined())
    )


def settle(graph: tf.Graph, training: bool = False) -> None:
    """Finds what was written since the last time, and exchanges all that is to become a mean.

    Args:
        graph: to which a session or an optimizer comes.
        training: whether updates are being made, so that ranks train the graph together.

    Raises:
        NotImplementedError: a session has run it already.
    """
    graph = graphs.outermost(graph)
    if _concerns(graph) and (training or _is_shared(graph)):
        _note_assignments(graph, written_in(graph))
        exchange(graph)
