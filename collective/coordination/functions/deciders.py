"""Lets ranks take the same branches of a traced function, and as many turns of its loops.

It matters where ranks exchange something in one, and where one updates variables that are the same
on all ranks: some would wait for others that don't come, or train another model. Ranks compare what
the choice depends on:

    branch    its predicate or index, before a call; or in it, if what is exchanged decides
    loop      before a call, those of its inputs on which its condition depends, in any turn

Other loops, and branches inside of branches, are refused when the function is traced.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from collective.coordination.branch_choices import BRANCHES, bodies_of
from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.graph import device_scopes, graph_analysis, graphs

LOOPS = frozenset({"While", "StatelessWhile"})


def compare(
    graph: Any,
    executed: Set[tf.Operation],
    written: Set[tf.Operation],
    updating: Set[tf.Operation],
) -> dict[str, list[tf.Tensor]]:
    """Returns what ranks have to compare before a call; what they compare in it is added.

    Args:
        graph: the function's.
        executed: what a call executes.
        written: the operations that write variables.
        updating: those of them that are branches or loops and update tables or trainable variables.

    Returns:
        What each choice depends on, by a name for people.

    Raises:
        NotImplementedError: it can't be compared.
    """
    before: dict[str, list[tf.Tensor]] = {}
    for op in graph.get_operations():
        if op not in executed:
            continue
        exchanges = _exchanges(graph, op)
        if op.type in BRANCHES and (exchanges or op in updating):
            kind, tensors = "branch", [op.inputs[0]]
        elif op.type in LOOPS and (exchanges or op in updating):
            kind, tensors = "loop", _inputs_of_condition(op)
        elif exchanges:
            _refuse(op, "loop over a dataset", "ranks may have different numbers of batches")
        else:
            continue
        for inner in _bodies(op):
            for nested in inner.get_operations():
                if _exchanges(inner, nested):
                    _refuse(nested, f"branch or loop inside a {kind}", "that is chosen too late")
        name = f"the {kind} '{op.name}'"
        late = [x for x in tensors if _is_late(graph, x, written)]
        if not late:
            before[name] = tensors
        elif kind == "loop":
            _refuse(op, kind, f"its turns depend on '{late[0].name}', which is known in it only")
        else:
            _compare_in_call(graph, op, name)
    return before


def _exchanges(graph: Any, op: tf.Operation) -> bool:
    """Tells whether a branch, a loop or a dataset's function has collectives inside."""
    may_have = op.type in BRANCHES or op.type in LOOPS or op.type.endswith("Dataset")
    return may_have and graph_analysis.has_inside(graph, op, graph_analysis.is_collective)


def _bodies(op: tf.Operation) -> list[Any]:
    """Returns the graphs that TensorFlow has traced for a branch or a loop."""
    return [op._cond_graph, op._body_graph] if op.type in LOOPS else bodies_of(op)


def _is_late(graph: Any, x: tf.Tensor, written: Set[tf.Operation]) -> bool:
    """Tells whether a tensor is known only after the ranks have agreed on the call."""
    return bool(gates_of(graph).level(x.op) or written & graph_analysis.upstream([x.op]))


def _compare_in_call(graph: Any, op: tf.Operation, name: str) -> None:
    """Lets a branch wait until ranks have found out that all of them take it."""
    with graph.as_default(), graphs.outside(), device_scopes.on_host(), tf.name_scope(None):
        with tf.name_scope("collective/branches"):
            own = op.inputs[0]
            own = tf.cast(own if own.dtype.is_integer else tf.cast(own, tf.bool), tf.int64)
            collective = collectives.unique_name(f"collective.branches.{op.name}")
            chosen = collectives.allgather(own[None], collective, gates_of(graph).at(1).zero)
            message = f"{name[0].upper()}{name[1:]} of a tf.function is not the same on all ranks: "
            is_same = tf.reduce_all(tf.equal(chosen, chosen[0]))
            check = tf.raw_ops.Assert(condition=is_same, data=[message, chosen])
    op._add_control_input(check)


def _inputs_of_condition(op: tf.Operation) -> list[tf.Tensor]:
    """Returns those inputs of a loop on which its condition depends, in any turn."""
    condition, body = op._cond_graph, op._body_graph
    needed = _arguments(op, condition, [condition.outputs[0]])
    while True:
        more = needed | _arguments(op, body, [body.outputs[i] for i in sorted(needed)])
        if more == needed:
            return [op.inputs[i] for i in sorted(needed)]
        needed = more


def _arguments(op: tf.Operation, graph: Any, values: list[tf.Tensor]) -> set[int]:
    """Returns the numbers of the arguments of a loop's function on which some values depend."""
    upstream = graph_analysis.walk([x.op for x in values], control=False)
    numbers = {x.op: i for i, x in enumerate(graph.inputs)}
    for each in upstream:
        if each not in numbers and each._is_stateful and each.type != "Placeholder":
            _refuse(op, "loop", f"its turns depend on '{each.name}' ({each.type})")
    found = {numbers[each] for each in upstream if each in numbers}
    for i in sorted(found):
        if op.inputs[i].dtype in (tf.resource, tf.variant):
            _refuse(op, "loop", f"its turns depend on '{op.inputs[i].name}'")
    return found


def _refuse(op: tf.Operation, kind: str, why: str) -> NoReturn:
    raise NotImplementedError(
        f"Ranks exchange something, such as gradients, in the {kind} '{op.name}' of a tf.function, "
        f"and can't make sure that all of them do: {why}. Exchange outside of it, or let it depend "
        "on arguments of the function alone."
    )
