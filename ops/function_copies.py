"""Functions with collectives that a graph calls several times: each call meets its peers under
names of its own.

The calls of one run may go on at the same time, and a function's operations have the names that
they got when it was traced. A second call therefore calls a copy of the function, in which the
collectives, and theirs alone, have other names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import function_pb2, graph_pb2

from collective.ops import graph_analysis, graphs
from collective.ops.control_flow import in_loops_one_at_a_time
from collective.ops.graph_state import state_of


@dataclasses.dataclass
class Calls:
    """What is known of a graph's calls.

    Attributes:
        version: of the graph when it was last read.
        called: by the operations that call, attribute by attribute, the functions that they have
            for themselves.
        taken: the functions that somebody has.
    """

    version: int = 0
    called: dict[tuple[tf.Operation, str], tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )
    taken: set[str] = dataclasses.field(default_factory=set)


def separate(graph: tf.Graph) -> None:
    """Gives each call in `graph` of a function with collectives a function of its own, before a
    session is told of the call.
    """
    known = state_of(graph).function_calls = state_of(graph).function_calls or Calls()
    if known.version == graph.version:
        return
    for op in graph.get_operations():
        if op.type not in graph_analysis.CALLS or not graph_analysis.has_inside(
            graph, op, graph_analysis.is_horovod
        ):
            continue
        in_loops_one_at_a_time(graph, op._get_control_flow_context())
        for name, value in op.node_def.attr.items():
            called = tuple(f.name for f in _named(graph, value))
            # a gradient gives a call another function
            if called and known.called.get((op, name)) != called:
                known.called[op, name] = own = tuple(_own(graph, f, known.taken) for f in called)
                if own != called:
                    op._set_func_attr(name, own[0]) if value.func.name else op._set_func_list_attr(
                        name, own
                    )
    known.version = graph.version


def _named(graph: tf.Graph, attribute: Any) -> list[Any]:
    """The functions of `graph` that an operation's attribute names: one, or those of its branches."""
    return [f for f in (attribute.func, *attribute.list.func) if f.name in graph._functions]


def _own(graph: tf.Graph, name: str, taken: set[str]) -> str:
    """`name`, or a copy of that function where somebody has it, or one that it calls, already."""
    definition = function_pb2.FunctionDef()
    definition.CopyFrom(graph._functions[name].cached_definition)
    collectives = {node.name for node in definition.node_def if graph_analysis.is_horovod(node.op)}
    inner = [
        f
        for node in definition.node_def
        for value in node.attr.values()
        for f in _named(graph, value)
    ]
    owned = [_own(graph, f.name, taken) for f in inner]
    shared = bool(collectives) and name in taken
    if not shared and owned == [f.name for f in inner]:
        taken.update({name} if collectives else ())
        return name
    for f, own in zip(inner, owned):
        f.name = own
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
    """Gives nodes of a function other names, wherever they are named."""

    def renamed(given: str) -> str:
        control, node = given.startswith("^"), given.lstrip("^")
        node, colon, output = node.partition(":")
        return "^" * control + names.get(node, node) + colon + output

    for node in definition.node_def:
        node.name = renamed(node.name)
        node.input[:] = [renamed(given) for given in node.input]
    for returned in (definition.ret, definition.control_ret):
        for key, given in dict(returned).items():
            returned[key] = renamed(given)
