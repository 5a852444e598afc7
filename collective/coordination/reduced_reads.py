"""Replaces fetches of a rank's own values by those of all ranks.

Higher layers say which tensors these are (`collective.replication.metric_reads`: states of metrics;
`collective.gradients.rank_parts`: rows of tables' gradients), and what no run may need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.run_extension import RewrittenFetches
from collective.errors import TableError
from collective.ops.graph import graph_analysis, graph_state
from collective.tensorflow_internals.sessions import session as session_lib


@dataclasses.dataclass
class ReducedReads:
    """Records which reads of a graph return the values of all ranks, and what no run may need.

    Attributes:
        wholes: the values of all ranks, by the names of tensors with this rank's values.
        refused: why operations must not run, or tensors (by their names) not be fetched: what they
            read can't be combined.
        refusals: how often `refused` has changed.
        refused_of_tables: why operations that compute with tables' gradients must not run.
    """

    wholes: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    refused: dict[tf.Operation | str, str] = dataclasses.field(default_factory=dict)
    refusals: int = 0
    refused_of_tables: dict[tf.Operation, str] = dataclasses.field(default_factory=dict)


def reads_of(graph: tf.Graph) -> ReducedReads:
    """Returns the record of `graph`."""
    return graph_state.of(graph, ReducedReads)


def rewrite_fetches(graph: tf.Graph, fetches: Any) -> RewrittenFetches | None:
    """Returns the fetches to run instead of `fetches`; None: run them unchanged."""
    reduced = reads_of(graph).wholes
    if not reduced:
        return None
    with graph.as_default():
        try:
            leaves = map(graph.as_graph_element, graph_analysis.flatten(fetches))
            if not any(isinstance(x, tf.Tensor) and x.name in reduced for x in leaves):
                return None
            mapper = session_lib._FetchMapper.for_fetch(fetches)
            elements = [graph.as_graph_element(leaf) for leaf in mapper.unique_fetches()]
        except (TypeError, ValueError, KeyError):
            return None  # TensorFlow refuses them itself.
    wholes = [reduced.get(x.name, x) if isinstance(x, tf.Tensor) else x for x in elements]
    return RewrittenFetches(wholes, mapper.build_results)


def refuse(graph: tf.Graph, operations: Iterable[tf.Operation], leaves: Iterable[Any]) -> None:
    """Refuses a run that reads values that can't be combined over ranks.

    Args:
        graph: the graph.
        operations: those that the run executes.
        leaves: its fetches.

    Raises:
        TableError: names the operation, the table, and what to do.
        ValueError: names the operation, the variable, and what it needs.
    """
    operations = set(operations)
    of_parts = reads_of(graph).refused_of_tables
    for op in sorted(of_parts.keys() & operations, key=lambda op: op._id):
        raise TableError(of_parts[op])
    refused = reads_of(graph).refused
    if not refused:
        return
    elements = map(graph.as_graph_element, leaves)
    names = [x.name for x in elements if isinstance(x, tf.Tensor) and x.name in refused]
    found = [op for op in operations if op in refused]
    if names or found:
        first = names[0] if names else min(found, key=lambda op: str(op.name))
        raise ValueError(refused[first])
