"""Gives operations the global step to which a run leads, also lookups built before the step.

    lookup, built first ──► placeholder with default 0
    optimizer, built later: the graph has a global step
    before a session sees the graph ──► the default is the global step + 1

A training run that needs the step is refused before ranks exchange anything if there is none.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Set
from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops.graph import device_scopes, graph_state, graphs, seen_operations
from collective.ops.graph.graph_analysis import (
    ASSIGNS,
    PASSES,
    WRITES,
    collective_kind,
    has_inside,
    holder,
    memory,
)
from collective.policy import EverySteps
from collective.tables.dynamic_table import DynamicTable

# Operations that an assigned value passes through on its way from its source.
_PASSED = frozenset({"Identity", "Cast", "Reshape"})


@dataclasses.dataclass
class NextStep:
    """Records what needs the global step of a graph.

    Attributes:
        tensor: int64 scalar, the global step to which a run leads; None if nothing asked for it.
        evicting_tables: the tables whose rows are evicted.
        drawing_tables: the tables that admit keys by chance.
        users: the tables of eager code that a function gives the step.
    """

    tensor: tf.Tensor | None = None
    evicting_tables: list[DynamicTable] = dataclasses.field(default_factory=list)
    drawing_tables: list[DynamicTable] = dataclasses.field(default_factory=list)
    users: list[DynamicTable] = dataclasses.field(default_factory=list)


def evicting_tables(graph: tf.Graph) -> list[DynamicTable]:
    """Returns the tables of `graph` whose rows are evicted."""
    return graph_state.of(graph, NextStep).evicting_tables


def tensor(graph: tf.Graph) -> tf.Tensor:
    """Returns the global step to which a run of `graph` leads, int64 scalar.

    It is 0 in a graph without a global step.
    """
    graph = graphs.outermost(graph)
    record = graph_state.of(graph, NextStep)
    if record.tensor is None:
        with graph.as_default(), graphs.outside(), device_scopes.on_host():
            record.tensor = tf.placeholder_with_default(
                tf.constant(0, tf.int64), [], "collective/next_step"
            )
    return record.tensor


def of_table(table: DynamicTable) -> tf.Tensor:
    """Returns `tensor` of the graph in which a table is looked up.

    `collective.tables.policies.eager_steps` lets that of a traced function follow an optimizer.
    """
    graph = graphs.outermost(tf.get_default_graph())
    if graphs.is_traced(graph):
        graph_state.of(graph, NextStep).users.append(table)
    return tensor(graph)


def connect(graph: tf.Graph) -> None:
    """Lets `tensor` follow the global step of `graph`, as soon as there is one.

    It must be called before a session sees the graph: TensorFlow accepts no change afterwards.
    """
    record = graph_state.of(graph, NextStep)
    if record.tensor is None or _is_connected(graph):
        return
    step = tf.train.get_global_step(graph)
    if step is None or record.tensor.op._id <= seen_operations.last(graph):
        return
    with (
        graphs.open_for_changes(graph),
        graph.as_default(),
        tf.init_scope(),
        device_scopes.on_host(),
    ):
        # The update that counts the step waits for gradients, which wait for lookups, and so for
        # this.
        value = step.read_value() if hasattr(step, "read_value") else step
        led_to = tf.add(tf.cast(value, tf.int64), 1, "collective/step_led_to")
        record.tensor.op._update_input(0, led_to)


def check(graph: tf.Graph, operations: Set[tf.Operation]) -> None:
    """Refuses a training run that needs a global step but can't have one.

    Every rank does so, since it depends only on the graph.

    Args:
        graph: the graph.
        operations: those that the run executes.

    Raises:
        TableError: there is no global step.
    """
    record = graph_state.of(graph, NextStep)
    for table in [*record.evicting_tables, *record.drawing_tables]:
        if table.handle.op not in operations:
            continue
        for needs, without in needs_of_step(table):
            _check_step(graph, table, needs, without)
            return


def _check_step(graph: tf.Graph, table: DynamicTable, needs: str, without: str) -> None:
    """Refuses a training run without a global step, and warns about a step that nothing counts.

    Args:
        graph: the graph.
        table: it needs the step.
        needs: says for what.
        without: says what happens if nothing counts it.
    """
    step = tf.train.get_global_step(graph)
    reads_it = table.last_used is not None or table.policy.draws_keys
    if step is None or (reads_it and not _is_connected(graph)):
        missing = (
            "its graph has no global step"
            if step is None
            else "its graph had no global step when a session ran it first"
        )
        raise TableError(
            f"table '{table.op.name}' {needs}, but {missing}. "
            "Call tf.train.get_or_create_global_step() where the model is built, and give it "
            "to the optimizer: minimize(loss, global_step=…)."
        )
    if not _is_counted(step):
        warnings.warn(
            f"table '{table.op.name}' {needs}, but nothing in the graph counts the global step: "
            f"{without}. Give it to the optimizer: "
            "minimize(loss, global_step=tf.train.get_global_step()).",
            stacklevel=3,
        )


def needs_of_step(table: DynamicTable) -> Iterator[tuple[str, str]]:
    """Yields for what a table needs the global step, and what happens if nothing counts it."""
    policy, older = table.policy, "rows don't get older"
    if policy.steps_to_live is not None:
        yield f"evicts rows by its policy's steps_to_live={policy.steps_to_live}", older
    elif policy.capacity is not None:
        yield f"evicts rows by its policy's capacity={policy.capacity}", older
    elif isinstance(policy.evict, EverySteps):
        yield f"evicts rows by its policy's evict={policy.evict}", older
    if policy.draws_keys:
        draws = f"draws keys by its policy's admit_probability={policy.admit_probability}"
        yield draws, "a key that isn't admitted never is"


def _is_connected(graph: tf.Graph) -> bool:
    next_step = graph_state.of(graph, NextStep).tensor
    return next_step is not None and next_step.op.inputs[0].op.type != "Const"


def most_counted(graph: tf.Graph) -> int | None:
    """Returns the largest number of global steps that one run of `graph` counts; None if unknown.

    This is the sum of what all counting operations add, each once. It is unknown if a loop or a
    function counts, or a computed value is assigned.
    """
    step = tf.train.get_global_step(graph)
    if step is None or isinstance(step, tf.Tensor):
        return None
    most = 0
    for op, is_in_loop in _changes(step):
        increment = None if is_in_loop else _increment(op)
        if increment is None:
            return None
        most += max(increment, 0)
    return most


def _increment(op: tf.Operation) -> int | None:
    """Returns what `op` adds to a variable; None if that isn't known."""
    sign = {"Add": 1, "Sub": -1}.get(op.type.removesuffix("VariableOp").removeprefix("Assign"))
    if sign is None:
        return None
    value = op.inputs[1]
    while value.op.type in PASSES | _PASSED:
        value = value.op.inputs[0]
    constant = tf.get_static_value(value)
    return None if constant is None else sign * int(constant)


def _is_counted(step: Any) -> bool:
    """Tells whether an operation of the graph changes the global step in training."""
    return isinstance(step, tf.Tensor) or any(True for _ in _changes(step))  # Unknown: a tensor.


def _changes(step: Any) -> Iterator[tuple[tf.Operation, bool]]:
    """Yields the operations that change the global step in training, and whether in a loop.

    Initializers, restores and broadcasts of rank 0's value don't.
    """
    users, seen = [(user, False) for user in memory(step).outputs[0].consumers()], set()
    while users:
        op, is_in_loop = users.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type in PASSES:
            is_in_loop = is_in_loop or op.type.endswith("Enter")
            users += [(user, is_in_loop) for x in op.outputs for user in x.consumers()]
        elif op.type.endswith(("Call", "While", "If", "Case")):
            if has_inside(op.graph, op, WRITES.match):
                yield op, is_in_loop
        elif WRITES.match(op.type) and holder(op.inputs[0]) is memory(step):
            is_first = op is step.initializer
            if not is_first and not (op.type in ASSIGNS and _is_given(op.inputs[1])):
                yield op, is_in_loop


def _is_given(value: tf.Tensor) -> bool:
    """Tells whether a checkpoint or rank 0 gives `value`."""
    while value.op.type in _PASSED:
        value = value.op.inputs[0]
    kind = collective_kind(value.op.type)
    return kind == "Broadcast" or kind.startswith("Restore")
