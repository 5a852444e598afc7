"""Which phase of a step an operation belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import run_analysis
from collective.ops import graph_analysis, op_attributes
from collective.ops.gate import gates_of
from collective.strategies.grouped_exchange import groups_of
from collective.tables.grouping import lookups_of

INPUT, LOOKUP, DENSE, OPTIMIZER, AGREEING = "input", "lookup", "dense", "optimizer", "agreement"
COMPUTED = (INPUT, LOOKUP, DENSE, OPTIMIZER)  # in the order of a step
# where an optimizer of TensorFlow's updates one variable
UPDATE = re.compile(r"^(.*/update_[^/]*)/")
# What reads data, whatever it is for. (Functions in Python and control flow may do that, too, or
# anything else.)
READS = (
    graph_analysis.SOURCES
    - graph_analysis.CALLS
    - {"PyFunc", "PyFuncStateless", "EagerPyFunc", "Merge", "Exit", "RemoteCall"}
)
# What the optimizer of graphs puts before the names of what it has made of an operation.
REWRITTEN = re.compile(
    r"^(?:ConstantFolding|ArithmeticOptimizer|Remapper|LoopOptimizer|DependencyOptimizer)/"
)


class Phases:
    """The phases of the operations of a run.

    input       what reads data, and everything between that and the ids of the lookups
    lookup      what a rank computes for its lookups: distinct keys, rows of its shards, pooling;
    and the gradients of that
    dense       the rest of the model and of its gradients
    optimizer   the updates
    agreement   what ranks tell each other before the run
    collective.…    a collective, by its name

    Args:
        graph: the graph.
        reach: what the run executes.
    """

    def __init__(self, graph: tf.Graph, footprint: run_analysis.RunFootprint):
        self._graph = graph
        written = [w for w in lookups_of(graph).written if w.out in footprint.operations]
        inputs = [x for w in written for x in w.lookup.inputs]
        members = [m for group in groups_of(graph) for m in group.members]
        opened = {x.name for m in members for x in (m.ids, m.samples, m.weights) if x is not None}
        self._lookup = graph_analysis.upstream(
            (w.out for w in written), {x.name for x in inputs} | opened
        )
        self._input = {
            op
            for op in graph_analysis.upstream(x.op for x in inputs)
            if gates_of(graph).level(op) == 0 and op not in self._lookup
        }
        self._lookup |= (
            graph_analysis.upstream(
                (check.bounds.op for check in gates_of(graph).checks),
                {x.name for x in inputs} | opened,
            )
            - self._input
        )
        self._lookup |= {
            x.op for m in members for x in (m.ids, m.samples, m.weights) if x is not None
        }
        self._updates = set(_updates(graph, footprint.operations))
        self._found: dict[str, str] = {}

    def of(self, name: str, kind: str) -> str | None:
        """The phase of the operation `name` of type `kind`; None for what only waits for something
        else of the run.
        """
        if name not in self._found:
            self._found[name] = self._look(name, kind) or ""
        return self._found[name] or None

    def _look(self, name: str, kind: str) -> str | None:
        if graph_analysis.is_horovod(kind):
            return name.rpartition("/")[2]
        # which takes as long as everything in front of it
        if name.startswith("collective/gate"):
            return None
        if name.startswith("collective/agreement"):
            return AGREEING
        op = self._operation(name)
        if (
            graph_analysis.WRITES.match(kind)
            or (found := UPDATE.match(name))
            and found[1] in self._updates
        ):
            return OPTIMIZER
        if kind in READS:
            return INPUT
        while op is not None:
            if op in self._lookup or op_attributes.kind(op).startswith("Collective"):
                return LOOKUP
            if op in self._input:
                return INPUT
            op = op._original_op  # of a gradient that of which it is
        return LOOKUP if kind.startswith("Collective") else DENSE

    def _operation(self, name: str) -> Any:
        try:
            return self._graph.get_operation_by_name(REWRITTEN.sub("", name).partition(":")[0])
        except (KeyError, ValueError):  # made by TensorFlow of several, or in a function
            return None


def _updates(graph: tf.Graph, operations: Iterable[tf.Operation]) -> Iterable[str]:
    for op in operations:
        found = UPDATE.match(str(op.name))
        if found and graph_analysis.WRITES.match(op.type):
            yield found[1]


def is_wait(kind: str) -> bool:
    """Whether an operation of this type waits for something while it runs, and needs no processor
    for that.
    """
    return (
        graph_analysis.is_horovod(kind)
        or kind in READS
        or kind in graph_analysis.CALLS
        or kind in ("_Recv", "_HostRecv")
    )
