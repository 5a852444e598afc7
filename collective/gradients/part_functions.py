"""Follows parts of tables' gradients into the functions of branches and calls, and out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.graph import library_operations

# The attributes that name the functions of an operation.
_FUNCTIONS = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}
TYPES = frozenset(_FUNCTIONS)


def outputs(
    op: tf.Operation,
    kinds: Mapping[int, Any],
    judge: Callable[[tf.Operation, Mapping[int, Any]], Any],
) -> dict[int, Any] | None:
    """Returns the kinds of what `op` returns, by their numbers; None if it can't be told.

    Args:
        op: a branch, or a call of a function.
        kinds: those of its inputs that are parts, by their numbers.
        judge: says what an operation makes of parts (`part_rules.verdict`).
    """
    decides = 0 if op.type.endswith("Call") else 1
    if decides and 0 in kinds:
        return None
    returned = [
        _returned(graph, {i - decides: kind for i, kind in kinds.items()}, judge)
        for graph in _graphs(op)
    ]
    if not returned or None in returned:
        return None
    first = returned[0]
    return first if all(other == first for other in returned) else None


def _graphs(op: tf.Operation) -> list[Any]:
    names: list[str] = []
    for attribute in _FUNCTIONS[op.type]:
        value = op.get_attr(attribute)
        names += [f.name for f in (value if isinstance(value, list) else [value])]
    functions = [op.graph._functions.get(name) for name in names]
    found = [getattr(function, "graph", None) for function in functions]
    return found if None not in found else []


def _returned(
    graph: Any,
    kinds: Mapping[int, Any],
    judge: Callable[[tf.Operation, Mapping[int, Any]], Any],
) -> dict[int, Any] | None:
    """Returns the kinds of what a function returns; None if rows come together inside."""
    known = {graph.inputs[i].name: kind for i, kind in kinds.items()}
    noted = library_operations.NotedOperations(graph)
    for op in graph.get_operations():  # Each after its inputs.
        of_inputs = {i: known[x.name] for i, x in enumerate(op.inputs) if x.name in known}
        if not of_inputs or noted.is_librarys(op):
            continue
        verdict = judge(op, of_inputs)
        # An optimizer updates this rank's shards by them.
        if verdict.reduces or (
            (verdict.refused or verdict.gathered or verdict.counted) and not noted.is_optimizers(op)
        ):
            return None
        known.update({op.outputs[i].name: kind for i, kind in verdict.outputs.items()})
    return {i: known[x.name] for i, x in enumerate(graph.outputs) if x.name in known}
