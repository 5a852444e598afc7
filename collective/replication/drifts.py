"""Warns of variables and tables to which a traced function assigns other values on each rank.

A layer that keeps a moving mean, a counter or a codebook by itself assigns what it computes of its
rank's records. In a graph such values become means over ranks (`assignments`); in a function they
are what the layer assigns, and the replicas drift apart. Of a table each row becomes what its owner
assigns.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.graph import graph_analysis, graph_state
from collective.ops.graph.graphs import outermost
from collective.replication import eager_states
from collective.replication.analysis import LIBRARY, RANDOM, REDUCED, takes_data
from collective.tables.dense_view import WholeWrites
from collective.tables.table import Sharded

_ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})


def warn_of_drifts(graph: Any) -> None:
    """Warns once of each variable or table to which a function assigns a rank's own value.

    Args:
        graph: of a function that ranks call together.
    """
    variables = {id(v.handle): v for v in graph.variables}
    captured = {inner.op: variables.get(id(outer)) for outer, inner in graph.captures}
    for op in graph.get_operations():
        variable = captured.get(op.inputs[0].op) if op.type in _ASSIGNS else None
        if variable is None or isinstance(variable, Sharded) or eager_states.state_of(variable):
            continue
        if is_of_rank(op.inputs[1], captured):
            _warn(graph, variable, "replicated variable", "the ranks' values drift apart")
    for table, value in graph_state.of(graph, WholeWrites).made:
        # As far as is known, all ranks pass the same whole table or number.
        if is_of_rank(value, captured, alike=([], [table.rows, table.dim])):
            _warn(graph, table, "table", "each row gets what its owner assigns")


def _warn(graph: Any, variable: Any, kind: str, consequence: str) -> None:
    if is_warned_of(variable):
        return
    note_warning(variable)
    if collectives.rank() == 0:
        tf.logging.warning(
            f"The {kind} '{variable.name}' is assigned in the function '{graph.name}' what each "
            f"rank alone knows (its data, its random numbers): {consequence}. Assign "
            "horovod.tensorflow.allreduce(x), the mean of the ranks' x, or allreduce(x, "
            "op=horovod.tensorflow.Sum)."
        )


def is_warned_of(variable: Any) -> bool:
    return hasattr(variable, "_collective_drifts")


def note_warning(variable: Any) -> None:
    """Notes that the script has been warned of a variable, once for all."""
    variable._collective_drifts = True


def is_of_rank(
    value: tf.Tensor, captured: Container[tf.Operation], alike: Sequence[list[int]] = ()
) -> bool:
    """Tells whether a value depends on a rank's data or random numbers, other than by all ranks'.

    Args:
        value: a tensor of a function.
        captured: what the function has captured, and not got as an argument.
        alike: the shapes of arguments that all ranks pass alike.
    """
    found, alike_on_all = False, collectives.replicated_operations(outermost(value.graph))
    alike_on_all = alike_on_all | {gate.zero.op for gate in gates_of(value.graph).gates}

    def stop(op: tf.Operation) -> bool:
        nonlocal found
        if graph_analysis.collective_kind(op.type) in REDUCED or op in alike_on_all:
            return True
        if op.type in graph_analysis.FED and LIBRARY in op.name:
            return False  # An exchange's own; what its ids come from is found by them.
        if op.type == "Placeholder":
            given = op.outputs[0]
            is_alike = given.shape.is_fully_defined() and given.shape.as_list() in alike
            found = found or not (op in captured or given.dtype == tf.resource or is_alike)
            return True
        is_drawn = RANDOM.match(op.type) is not None and "Stateless" not in op.type
        found = found or is_drawn or takes_data(op)
        return found

    graph_analysis.walk([value.op], lambda op: [x.op for x in op.inputs], stop, control=False)
    return found
