"""Warns of variables that a traced function gives other values on each rank.

A layer that keeps a moving mean, a counter or a codebook by itself assigns what it computes of its
rank's records. In a graph such values become means over ranks (`assignments`); in a function they
are what the layer assigns, and the replicas drift apart.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.graph import graph_analysis
from collective.ops.graph.graphs import outermost
from collective.replication import eager_states
from collective.replication.analysis import RANDOM, REDUCED, takes_data
from collective.tables.table import Sharded

_ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})


def warn_of_drifts(graph: Any) -> None:
    """Warns once of each replicated variable to which a function assigns a rank's own value.

    Args:
        graph: of a function that ranks call together.
    """
    variables = {id(v.handle): v for v in graph.variables}
    captured = {inner.op: variables.get(id(outer)) for outer, inner in graph.captures}
    for op in graph.get_operations():
        variable = captured.get(op.inputs[0].op) if op.type in _ASSIGNS else None
        if variable is None or isinstance(variable, Sharded) or eager_states.state_of(variable):
            continue
        if not is_warned_of(variable) and _is_of_rank(op.inputs[1], captured):
            note_warning(variable)
            if collectives.rank() == 0:
                tf.logging.warning(
                    f"The replicated variable '{variable.name}' is assigned in the function "
                    f"'{graph.name}' what each rank alone knows (its data, its random numbers): "
                    "the ranks' values drift apart. Assign horovod.tensorflow.allreduce(x), the "
                    "mean of the ranks' x, or allreduce(x, op=horovod.tensorflow.Sum)."
                )


def is_warned_of(variable: Any) -> bool:
    return hasattr(variable, "_collective_drifts")


def note_warning(variable: Any) -> None:
    """Notes that the script has been warned of a variable, once for all."""
    variable._collective_drifts = True


def _is_of_rank(value: tf.Tensor, captured: dict[tf.Operation, Any]) -> bool:
    """Tells whether a value depends on a rank's data or random numbers, other than by all ranks'.

    Args:
        value: a tensor of a function.
        captured: what the function has captured, and not got as an argument.
    """
    found, replicated = False, collectives.replicated_operations(outermost(value.graph))

    def stop(op: tf.Operation) -> bool:
        nonlocal found
        if graph_analysis.collective_kind(op.type) in REDUCED or op in replicated:
            return True
        if op.type == "Placeholder":
            found = found or (op not in captured and op.outputs[0].dtype != tf.resource)
            return True
        is_drawn = RANDOM.match(op.type) is not None and "Stateless" not in op.type
        found = found or is_drawn or takes_data(op)
        return found

    graph_analysis.walk([value.op], lambda op: [x.op for x in op.inputs], stop, control=False)
    return found
