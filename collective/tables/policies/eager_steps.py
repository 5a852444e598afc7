"""Gives functions that eager code calls the step to which a call leads, as `next_step` gives runs.

    lookups, traced first ──► placeholder with default 0
    an optimizer that updates variables, traced later ──► its number of steps + 1
    the function is traced to its end ──► the placeholder's default is that

Eager code has no global step. In its place is the number of steps (`iterations`) of the optimizer
that updates the tables.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops.graph import device_scopes, graph_state, graphs
from collective.policy import EverySteps, TablePolicy
from collective.tables.dynamic_table import DynamicTable
from collective.tables.policies import next_step

# Those whose policies need the step, by their ids: TensorFlow's variables can't be in sets.
_tables: weakref.WeakValueDictionary[int, DynamicTable] = weakref.WeakValueDictionary()


@dataclasses.dataclass
class CallStep:
    """Records which steps a traced function counts.

    Attributes:
        led_to: the numbers of steps of its optimizers, and the tensors of those to which a call
            leads, by the ids of the numbers.
        counter: the number of steps of the first optimizer that updates tables; without one, of
            the first optimizer.
        updates_tables: whether that one updates tables.
        tables: those that the function uses in training, or updates, and whose policies need the
            step.
    """

    led_to: dict[int, tuple[tf.Variable, tf.Tensor]] = dataclasses.field(default_factory=dict)
    counter: tf.Variable | None = None
    updates_tables: bool = False
    tables: list[DynamicTable] = dataclasses.field(default_factory=list)


def of_call(graph: tf.Graph) -> CallStep:
    """Returns what is known about the steps of a traced function."""
    return graph_state.of(graph, CallStep)


def need(policy: TablePolicy) -> bool:
    """Tells whether a policy needs the step."""
    options = policy.steps_to_live, policy.capacity
    by_steps = isinstance(policy.evict, EverySteps)
    return policy.draws_keys or by_steps or any(option is not None for option in options)


def register(table: DynamicTable) -> None:
    """Notes a new table of eager code whose policy may need the step."""
    if need(table.policy):
        _tables[id(table)] = table


def is_registered(variable: Any) -> bool:
    """Tells whether a variable is a table of eager code whose policy needs the step."""
    return id(variable) in _tables


def tables_of(counter: Any) -> list[DynamicTable]:
    """Returns the tables whose steps `counter` counts, in the same order on all ranks."""
    known = [table for table in list(_tables.values()) if table.iterations is counter]
    return sorted(known, key=lambda table: str(table.op.name))


def trained(table: DynamicTable) -> int:
    """Returns how many steps have trained a table of eager code; 0 if nothing has counted them."""
    return 0 if table.iterations is None else int(table.iterations.numpy())


def follow(table: DynamicTable, counter: Any) -> None:
    """Lets a table follow an optimizer's number of steps."""
    if table.iterations is not counter:
        table.iterations = counter
        table.evicted_at = trained(table)


def note_update(optimizer: Any, tables: Sequence[Any]) -> None:
    """Notes, before a Keras optimizer's update in a traced function, to which step it leads.

    Args:
        optimizer: the optimizer.
        tables: those that it updates, of any kind.
    """
    graph = graphs.outermost(tf.get_default_graph())
    if not _tables or not graphs.is_traced(graph):
        return
    call = of_call(graph)
    with tf.init_scope():
        counter = optimizer.iterations  # A legacy optimizer makes it now.
    if id(counter) not in call.led_to:
        with graph.as_default(), graphs.outside(), device_scopes.on_host():
            value = tf.cast(counter.read_value(), tf.int64)
            call.led_to[id(counter)] = counter, tf.add(value, 1, "collective/step_led_to")
    if call.counter is None or tables and not call.updates_tables:
        call.counter, call.updates_tables = counter, bool(tables)
    call.tables += [table for table in tables if is_registered(table)]


def settle(graph: tf.Graph, trains: bool) -> None:
    """Connects the step of a function that was traced to its end.

    Args:
        graph: the function's.
        trains: whether its calls update something.

    Raises:
        TableError: it trains, and a table needs the step, but no optimizer counts any.
    """
    if not trains:
        return
    known, call = graph_state.of(graph, next_step.NextStep), of_call(graph)
    call.tables = list({id(table): table for table in [*call.tables, *known.users]}.values())
    if not call.tables:
        return
    if call.counter is None:
        table = call.tables[0]
        needs, _ = next(next_step.needs_of_step(table))
        raise TableError(
            f"table '{table.op.name}' {needs}, but the function '{graph.name}' trains without an "
            "optimizer of Keras, whose steps it would count. Update variables by "
            "optimizer.apply_gradients."
        )
    counter, led_to = call.led_to[id(call.counter)]
    if known.tensor is not None:
        known.tensor.op._update_input(0, led_to)
    for table in call.tables:
        follow(table, counter)
