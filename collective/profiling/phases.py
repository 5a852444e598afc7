"""Determines the phase of a step that an operation belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import run_analysis
from collective.ops.communication.collective_names import AGREEMENT
from collective.ops.communication.gate import gates_of
from collective.ops.graph import graph_analysis
from collective.profiling.report.phases import DENSE, INPUT, LOOKUP, OPTIMIZER
from collective.strategies.grouped_exchange import groups_of
from collective.tables.grouping import lookups_of

# The name scope in which TensorFlow's optimizers update one variable.
UPDATE = re.compile(r"^(.*/update_[^/]*)/")
# Types of operations that only read data. (Functions in Python and control flow may do that, too,
# or anything else.)
READS = (
    graph_analysis.SOURCES
    - graph_analysis.CALLS
    - {"PyFunc", "PyFuncStateless", "EagerPyFunc", "Merge", "Exit", "RemoteCall"}
)
# TensorFlow's graph optimizer puts this before the names of operations that it has rewritten.
REWRITTEN = re.compile(
    r"^(?:ConstantFolding|ArithmeticOptimizer|Remapper|LoopOptimizer|DependencyOptimizer)/"
)


class Phases:
    """Finds the phases of the operations of a run.

    input           reads of data, and everything between them and the ids of the lookups
    lookup          a rank's own part of its lookups: distinct keys, rows of its shards, pooling;
                    and the gradients of that
    dense           the rest of the model and of its gradients
    optimizer       the updates
    agreement       the exchange of headers before the run
    collective.…    a collective, by its name

    Args:
        graph: the graph.
        footprint: the run's.
    """

    def __init__(self, graph: tf.Graph, footprint: run_analysis.RunFootprint):
        self._graph, gates = graph, gates_of(graph)
        written = [w for w in lookups_of(graph).written if w.out in footprint.operations]
        inputs = [x for w in written for x in w.lookup.inputs]
        member_inputs = [
            x
            for group in groups_of(graph)
            for member in group.members
            for x in (member.ids, member.samples, member.weights)
            if x is not None
        ]
        known = {x.name for x in [*inputs, *member_inputs]}
        lookup = graph_analysis.upstream((w.out for w in written), known)
        self._input = {
            op
            for op in graph_analysis.upstream(x.op for x in inputs)
            if gates.level(op) == 0 and op not in lookup
        }
        checks = graph_analysis.upstream((check.bounds.op for check in gates.checks), known)
        self._lookup = lookup | (checks - self._input) | {x.op for x in member_inputs}
        self._updates = set(_update_scopes(footprint.operations))
        self._phases: dict[tuple[str, str], str | None] = {}

    def of(self, name: str, kind: str) -> str | None:
        """Returns the phase of an operation; None if it only waits for another one.

        Args:
            name: the operation's name.
            kind: its type.
        """
        if (name, kind) not in self._phases:
            self._phases[name, kind] = self._find(name, kind)
        return self._phases[name, kind]

    def _find(self, name: str, kind: str) -> str | None:
        if graph_analysis.is_of_carrier(kind):
            return name.rpartition("/")[2]
        # A gate takes as long as everything in front of it.
        if name.startswith("collective/gate"):
            return None
        if name.startswith("collective/agreement"):
            return AGREEMENT
        update = UPDATE.match(name)
        if graph_analysis.WRITES.match(kind) or (update and update[1] in self._updates):
            return OPTIMIZER
        if kind in READS:
            return INPUT
        op = self._operation(name)
        while op is not None:
            if op in self._lookup or _is_compiled(op.type):
                return LOOKUP
            if op in self._input:
                return INPUT
            # An operation of a gradient has the phase of the operation whose gradient it is.
            op = op._original_op
        return LOOKUP if _is_compiled(kind) else DENSE

    def _operation(self, name: str) -> Any:
        try:
            return self._graph.get_operation_by_name(REWRITTEN.sub("", name).partition(":")[0])
        except (KeyError, ValueError):  # made by TensorFlow of several, or in a function
            return None


def _update_scopes(operations: Iterable[tf.Operation]) -> Iterable[str]:
    """Yields the name scopes in which optimizers update variables."""
    for op in operations:
        update = UPDATE.match(str(op.name))
        if update and graph_analysis.WRITES.match(op.type):
            yield update[1]


def _is_compiled(kind: str) -> bool:
    """Tells whether operations of this type are compiled ones of lookups."""
    return kind.startswith("Collective") and not graph_analysis.is_of_carrier(kind)


def is_wait(kind: str) -> bool:
    """Tells whether operations of this type need no processor while they run."""
    return (
        graph_analysis.is_of_carrier(kind)
        or kind in READS
        or kind in graph_analysis.CALLS
        or kind in ("_Recv", "_HostRecv")
    )
