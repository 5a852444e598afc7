"""Prepares a traced `tf.function` for calls that ranks agree on (`calls`).

When a function with collectives is traced to its end, it gets an agreement, for which its gate
waits, and with it every collective and every write:

    data, bounds of ids ──► agreement ──► gate ──► collectives ──► updates

Other writes (metrics, an optimizer's number of steps) wait, too: a refused call changes nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import reduced_reads, run_analysis
from collective.coordination.functions import calls, deciders, stops
from collective.coordination.functions.calls import FunctionPlan, Plans
from collective.job.progress_board import Label
from collective.ops.communication import collectives
from collective.ops.communication.gate import TracedGate, gates_of
from collective.ops.graph import (
    device_scopes,
    graph_analysis,
    graph_state,
    graphs,
    training_flag,
)
from collective.tables import traced_lookups
from collective.tables.policies import eager_steps
from collective.tables.table import is_replicated, shard_of


def close(graph: Any) -> None:
    """Gives a function that was traced to its end an agreement, if it has collectives.

    Raises:
        NotImplementedError: ids depend on what is exchanged; or ranks can't make sure that they
            take the same branches, in which they exchange something; or a lookup would read rows
            that are written after it.
        TableError: it computes with rows of a table's gradient what only all ranks' rows tell.
    """
    _leave_later_operations(graph)
    gates = gates_of(graph)
    ends = [*(x.op for x in graph.outputs), *graph.control_outputs]
    executed = graph_analysis.upstream(ends)
    written = _writes(graph, executed)
    _check_order(graph, executed, written)
    if collectives.size() == 1:
        _close_alone(graph, executed, written, gates.checked)
        return
    reduced_reads.refuse(graph, executed, ())
    if not gates.gates:
        return
    gate = gates.gates[0]
    assert isinstance(gate, TracedGate)
    zero = gate.zero
    if zero.op.inputs[0].op.type != "PlaceholderWithDefault":
        return  # It answers calls of another one, and ranks agree outside of it.
    gates.changed()
    for check in gates.checks:
        if gates.level(check.bounds.op):
            gates.at(2, check.tables[0])  # says why not
    updating = _updating_branches(graph, written)
    choices = deciders.compare(graph, executed, set(written), updating)
    executed = graph_analysis.upstream(ends)
    may_end = _sources(graph, executed)
    sources = [op for op in may_end if not (gates.level(op) or op in updating)]
    deciding = [x for tensors in choices.values() for x in tensors]
    known = [x.op for x in (*deciding, *(check.bounds for check in gates.checks))]
    known += [] if gate.records is None else [gate.records.op]
    before = graph_analysis.upstream([*sources, *known])
    plans = graph_state.of(graph, Plans)
    with graph.as_default(), graphs.outside(), device_scopes.on_host(), tf.name_scope(None):
        with tf.name_scope("collective/agreement"):
            each = [check.bounds for check in gates.checks]
            bounds = tf.concat(each or [tf.zeros([0, 2], tf.int64)], 0)
            with tf.control_dependencies(sources):
                agreed, weight = calls.agreement_on(plans, bounds, choices, gate.records)
    zero.op._update_input(0, agreed)
    if gate.weight is not None:
        gate.weight.op._update_input(0, weight)
    own = [op for op in graph.get_operations() if collectives.is_scripts_own(op)]
    for op in [*written, *own]:
        # What a branch does by itself doesn't wait for all that the branch gets.
        if op not in before and (op.type in graph_analysis.CALLS or not gates.level(op)):
            op._add_control_input(zero.op)
    gates.changed()
    plans.plan = dataclasses.replace(
        _plan(graph, executed, written),
        chooses=bool(choices),
        unweighed=tuple(sorted({name for names in gates.unweighed.values() for name in names})),
    )
    _note_step(graph, executed, plans.plan.trains)


def _leave_later_operations(graph: Any) -> None:
    """Lets exchanges not wait for operations that need what they give.

    TensorFlow lets operations with side effects follow each other as they were made. Exchanges are
    made last, when lookups are grouped: the script may print rows before.
    """
    waits: dict[tf.Operation, list[tf.Operation]] = {}
    for op in graph.get_operations():
        if op.type.startswith("Collective"):
            for waited in op.control_inputs:
                if not waited.type.startswith("Collective"):
                    waits.setdefault(waited, []).append(op)
    for waited, ours in waits.items():
        needed = graph_analysis.upstream([waited])
        for op in needed.intersection(ours):
            kept = [x for x in op.control_inputs if x is not waited]
            op._remove_all_control_inputs()
            op._add_control_inputs(kept)


def _check_order(graph: Any, executed: set[tf.Operation], written: Sequence[tf.Operation]) -> None:
    """Refuses a function in which something writes a table between a lookup and its exchange.

    Methods of tables have lookups grouped before they write (`grouping.before_write`).
    """
    lookups = [lookup for lookup in traced_lookups.lookups_in(graph) if lookup.out in executed]
    if not lookups:
        return
    handles, writes = _handles_inside(graph), collections.defaultdict(list)
    for op in written:
        for memory in {graph_analysis.holder(x) for x in op.inputs}:
            writes[memory].append(op)
    for lookup in lookups:
        table, group = lookup.lookup.table, lookup.group
        handle = handles.get(id(table.handle))
        for op in writes[handle.op] if group and handle is not None else []:
            if group and lookup.out._id < op._id < group.pool._id:
                raise NotImplementedError(
                    f"'{op.name}' ({op.type}) writes the table '{table.op.name}' in a tf.function "
                    "after a lookup of it, which would find what is written. Make two functions "
                    "of it, or write the table by its own methods (assign, assign_add, "
                    "assign_sub), directly in the function that eager code calls."
                )


def _note_step(graph: Any, executed: set[tf.Operation], trains: bool) -> None:
    if trains:
        traced_lookups.refuse_half_precision(f"the function '{graph.name}' trains")
    training_flag.set_in_function(graph, trains)
    eager_steps.settle(graph, trains)
    plans = graph_state.of(graph, Plans)
    plans.step = stops.Step(trains, run_analysis.takes_batch(executed))


def _close_alone(
    graph: Any,
    executed: set[tf.Operation],
    written: Sequence[tf.Operation],
    checks: Sequence[tf.Operation],
) -> None:
    """Lets all writes of a function that trains wait for its data and checks, on one rank.

    TensorFlow itself counts a step in a call that finds the data at their end.

    Args:
        graph: the function's.
        executed: what a call executes.
        written: the operations that write variables.
        checks: of the ids of its lookups.
    """
    trains = bool(_updated(graph, written))
    _note_step(graph, executed, trains)
    updating = _updating_branches(graph, written)
    first = [op for op in _sources(graph, executed) if op not in updating]
    first += [op for op in checks if op in executed]
    if not first or not trains:
        return
    before = graph_analysis.upstream(first)
    for op in written:
        if op not in before:
            op._add_control_inputs(first)


def _updating_branches(graph: Any, written: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Returns the branches and loops among the writes that update variables.

    Averages of weights are one kind.
    """
    kinds = deciders.BRANCHES | deciders.LOOPS
    return {op for op in written if op.type in kinds and _updated(graph, [op])}


def _sources(graph: Any, executed: set[tf.Operation]) -> list[tf.Operation]:
    return [
        op for op in graph.get_operations() if op in executed and op.type in graph_analysis.SOURCES
    ]


def _writes(graph: Any, operations: set[tf.Operation]) -> list[tf.Operation]:
    """Returns the operations that write variables, calls of functions that do included."""
    return [
        op
        for op in graph.get_operations()
        if op in operations
        and (
            graph_analysis.WRITES.match(op.type)
            or op.type in graph_analysis.CALLS
            and graph_analysis.has_inside(graph, op, graph_analysis.WRITES.match)
        )
    ]


@dataclasses.dataclass
class Handles:
    """Records what a function calls the handles of variables outside, by their ids.

    TensorFlow forgets those of a function's arguments when it is traced to its end, and doesn't
    count arguments among the graph's variables.

    Attributes:
        inside: the handles, by the ids of those outside.
        arguments: the tables that the function gets; a function is traced for each table.
    """

    inside: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    arguments: list[weakref.ref[tf.Variable]] = dataclasses.field(default_factory=list)


def note_handles(graph: tf.Graph, arguments: Any = ()) -> None:
    """Notes the handles of the variables that a function uses so far.

    Args:
        graph: the function's.
        arguments: what it gets, nested.
    """
    handles = graph_state.of(graph, Handles)
    handles.inside.update({id(external): inner for external, inner in graph.captures})
    tables = [x for x in tf.nest.flatten(arguments) if shard_of(x) is not None]
    handles.arguments += map(weakref.ref, tables)


def _handles_inside(graph: Any) -> dict[int, tf.Tensor]:
    """Returns what a function calls the handles of variables outside, by their ids."""
    note_handles(graph)
    return graph_state.of(graph, Handles).inside


def _updated(graph: Any, written: Sequence[tf.Operation]) -> list[Any]:
    """Returns the tables and trainable variables that operations of a function write."""
    inside = _handles_inside(graph)
    arguments = [table() for table in graph_state.of(graph, Handles).arguments]
    holders = {graph_analysis.holder(x) for op in written for x in op.inputs}
    return [
        v
        for v in {id(v): v for v in [*graph.variables, *arguments] if v is not None}.values()
        if id(v.handle) in inside
        and inside[id(v.handle)].op in holders
        # Keras's counters of steps are trainable, too, as far as TensorFlow knows.
        and (v.trainable and v.dtype.is_floating or shard_of(v) is not None)
    ]


def _plan(graph: Any, executed: set[tf.Operation], written: Sequence[tf.Operation]) -> FunctionPlan:
    shared = tuple(sorted(run_analysis.shared_names(graph, executed, ())))
    variables = {id(v): v for v in graph.variables}
    updated = _updated(graph, written)
    trains = bool(updated)
    description = f"calls the function '{graph.name}'"
    if not graph_state.of(graph, Plans).is_part:
        for variable in updated:
            variable._collective_trained_by = weakref.ref(graph)
    return FunctionPlan(
        description,
        shared,
        run_analysis.signature_of([description, *shared], trains, False),
        trains,
        gates_of(graph).checks,
        sorted((v for v in variables.values() if is_replicated(v)), key=calls.order),
        Label(description, shared),
        graph,
        frozenset(executed),
    )


def check_traced_outside(graph: Any) -> None:
    """Checks a function that was traced while no scope() was open, and is called in one.

    Raises:
        NotImplementedError: it updates a trainable variable: by this rank's gradients alone.
    """
    known = graph_state.of(graph, Plans)
    if known.is_harmless or collectives.size() == 1:
        return
    # A plain assignment restores a saved model's values, or copies others.
    changes = [
        op for op in _writes(graph, set(graph.get_operations())) if op.type != "AssignVariableOp"
    ]
    updated = _updated(graph, changes)
    if updated:
        raise NotImplementedError(
            f"The function '{graph.name}' was traced outside of `with strategy.scope():`, where it "
            f"updates the variable '{updated[0].name}' by the data of a single rank. Call it in "
            "the scope from its first call on, or make another tf.function of it there."
        )
    known.is_harmless = True
