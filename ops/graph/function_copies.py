"""Gives each call of a function with collectives its own collectives.

The calls of one run may proceed at the same time, and a function's operations have the names that
they got when it was traced. So a second call calls a copy of the function, in which only the
collectives have other names: each call meets its peers under its own names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis, graph_state, graphs
from collective.ops.graph.control_flow import in_loops_one_at_a_time
from collective.tensorflow_internals.graphs import function_pb2, graph_pb2


@dataclasses.dataclass
class Calls:
    """Records a graph's calls of functions.

    Attributes:
        version: the graph's version when it was last read.
        called: maps each calling operation, by attribute, to the functions that only it calls.
        taken: the functions that some call uses.
    """

    version: int = 0
    called: dict[tuple[tf.Operation, str], tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )
    taken: set[str] = dataclasses.field(default_factory=set)


def separate(graph: tf.Graph) -> None:
    """Gives each call in `graph` of a function with collectives its own function.

    It must happen before a session sees the call.
    """
    calls = graph_state.of(graph, Calls)
    if calls.version == graph.version:
        return
    for op in graph.get_operations():
        if op.type not in graph_analysis.CALLS or not graph_analysis.has_inside(
            graph, op, graph_analysis.is_of_carrier
        ):
            continue
        in_loops_one_at_a_time(graph, op._get_control_flow_context())
        for name, value in op.node_def.attr.items():
            called = tuple(f.name for f in _functions_named(graph, value))
            # A gradient gives a call another function.
            if called and calls.called.get((op, name)) != called:
                exclusive = tuple(_exclusive_function(graph, f, calls.taken) for f in called)
                calls.called[op, name] = exclusive
                if exclusive == called:
                    continue
                if value.func.name:
                    op._set_func_attr(name, exclusive[0])
                else:
                    op._set_func_list_attr(name, exclusive)
    calls.version = graph.version


def _functions_named(graph: tf.Graph, attribute: Any) -> list[Any]:
    """Returns the functions of `graph` that an operation's attribute names.

    There is one function, or one per branch.
    """
    return [f for f in (attribute.func, *attribute.list.func) if f.name in graph._functions]


def _exclusive_function(graph: tf.Graph, name: str, taken: set[str]) -> str:
    """Returns a function that no other call uses: `name`, or a copy of it.

    It is copied if another call uses it, or uses one of the functions that it calls.
    """
    definition = function_pb2.FunctionDef()
    definition.CopyFrom(graph._functions[name].cached_definition)
    collectives = {
        node.name for node in definition.node_def if graph_analysis.is_of_carrier(node.op)
    }
    inner = [
        f
        for node in definition.node_def
        for value in node.attr.values()
        for f in _functions_named(graph, value)
    ]
    owned = [_exclusive_function(graph, f.name, taken) for f in inner]
    shared = bool(collectives) and name in taken
    if not shared and owned == [f.name for f in inner]:
        taken.update({name} if collectives else ())
        return name
    for f, exclusive in zip(inner, owned):
        f.name = exclusive
    number = 2
    while f"{name}_call{number}" in graph._functions:
        number += 1
    if shared:
        _rename(definition, {old: f"{old}.call{number}" for old in collectives})
    definition.signature.name = f"{name}_call{number}"
    library = function_pb2.FunctionDefLibrary(function=[definition])
    with graph.as_default(), graphs.open_for_changes(graph):
        tf.graph_util.import_graph_def(graph_pb2.GraphDef(library=library), name="")
    return definition.signature.name


def _rename(definition: Any, names: dict[str, str]) -> None:
    """Gives nodes of a function other names wherever they are named."""

    def renamed(name_used: str) -> str:
        control, node = name_used.startswith("^"), name_used.lstrip("^")
        node, colon, output = node.partition(":")
        return "^" * control + names.get(node, node) + colon + output

    for node in definition.node_def:
        node.name = renamed(node.name)
        node.input[:] = [renamed(name_used) for name_used in node.input]
    for returned in (definition.ret, definition.control_ret):
        for key, name_used in dict(returned).items():
            returned[key] = renamed(name_used)
