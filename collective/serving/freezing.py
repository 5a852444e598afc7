"""Refuses to freeze a graph of sharded tables, whose rows can't become constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops.graph import graph_analysis
from collective.tables.table import Table


def freeze(
    original: Any, session: Any, graph_def: Any, output_node_names: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `convert_variables_to_constants_from_session_graph`.

    Raises:
        TableError: an output needs rows of other ranks.
    """
    needed = _needed(graph_def, output_node_names)
    if any(graph_analysis.is_of_carrier(op_type) for op_type in needed.values()):
        tables = [
            f"'{variable.op.name}'"
            for variable in session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
            if isinstance(variable, Table) and graph_analysis.memory(variable).name in needed
        ]
        what = f"table{'s' if len(tables) > 1 else ''} {', '.join(tables)}" if tables else "tables"
        raise TableError(
            f"Freezing {what} is not supported (convert_variables_to_constants, freeze_graph): the "
            "rows are on several ranks, and the graph has the exchange between them. Export a "
            "SavedModel on all ranks by strategy.export_saved_model: it has TensorFlow's own "
            "operations only, and plain TensorFlow can freeze it."
        )
    return original(session, graph_def, output_node_names, *args, **kwargs)


def _needed(graph_def: Any, outputs: Sequence[str]) -> dict[str, str]:
    """Returns what outputs of a graph need, with the functions it calls: {name: operation type}."""
    nodes = {node.name: node for node in graph_def.node}
    functions = {f.signature.name: f for f in graph_def.library.function}
    needed: dict[str, str] = {}
    waiting = list(outputs)
    while waiting:
        name = waiting.pop().lstrip("^").partition(":")[0]
        if name in needed or name not in nodes:
            continue
        node = nodes[name]
        needed[name] = node.op
        waiting += node.input
        for inner in _called(node, functions):
            needed[f"{name}/{inner.name}"] = inner.op
    return needed


def _called(node: Any, functions: dict[str, Any]) -> list[Any]:
    """Returns the operations of the functions that an operation calls, and those call."""
    found: list[Any] = []
    seen: set[str] = set()
    waiting = [node]
    while waiting:
        caller = waiting.pop()
        names = {caller.op}
        for value in caller.attr.values():
            names |= {value.func.name, *(function.name for function in value.list.func)}
        for name in names & functions.keys() - seen:
            seen.add(name)
            found += functions[name].node_def
            waiting += functions[name].node_def
    return found
