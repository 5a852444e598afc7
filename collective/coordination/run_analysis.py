"""What a session's run will use, read off the graph: pure, no ranks and no session involved."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import collectives, graph_analysis
from collective.ops.gate import Check, GraphGates, gates_of
from collective.ops.op_attributes import kind
from collective.strategies.grouped_exchange import groups_of, required_operations


@dataclasses.dataclass(frozen=True)
class Answer:
    """How a rank without data takes part in its peers' evaluation: it asks for nothing and gives
    the rows that they ask for.

    Attributes:
        operations: the collectives of the run.
        feeds: no keys in place of the run's, and the first gate open: the ranks have agreed outside
            of the run.
        states: what is fed, too, with the value that another tensor has.
    """

    operations: list[tf.Operation]
    feeds: list[tuple[tf.Tensor, Any]]
    states: list[tuple[tf.Tensor, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class RunFootprint:
    """The part of a graph that a run executes.

    Attributes:
        operations: everything that is executed.
        shared: the names of what all ranks must do alike: its collectives, the calls, branches and
            loops that have some inside, the lookups of groups that it needs, the variables that it
            initializes, what is called `communication.ALIKE`, options of scope(); sorted.
        signature: 63 bits of them, by which ranks compare their runs.
        initialized: the global variables whose initializers run.
        trains: whether it updates a table or a global variable. What doesn't is an evaluation.
        nothing: what it is fed for the lookups of its groups that it doesn't need.
    """

    operations: frozenset[tf.Operation]
    shared: tuple[str, ...]
    signature: int
    initialized: tuple[Any, ...]
    trains: bool
    nothing: tuple[tuple[tf.Tensor, np.ndarray], ...]

    def alike(self, names: Iterable[str]) -> RunFootprint:
        """The same, for ranks that compare `names`, too."""
        shared = tuple(sorted([*self.shared, *names]))
        return dataclasses.replace(self, shared=shared, signature=_signature(shared, self.trains))

    def levels(self, gates: GraphGates) -> list[int]:
        """The levels of the gates that it passes, ascending."""
        return [gate.level for gate in gates.gates if gate.zero.op in self.operations]

    def checks(self, gates: GraphGates, level: int, first: bool) -> list[Check]:
        """The lookups' checks that the gate of `level`, the `first` of the run or not, waits for."""
        names = set(self.shared)
        known = range(level) if first else [level - 1]
        return [
            check
            for check in gates.checks
            if check.collective in names and gates.level(check.bounds.op) in known
        ]

    def sources(self, gates: GraphGates) -> list[tf.Operation]:
        """The operations that may end or fail before any collective, in the order of their names."""
        # A queue that this run fills behind a gate can't be waited for in front of it.
        filled = {
            op.inputs[0].op
            for op in self.operations
            if "Enqueue" in op.type and gates.level(op) > 0
        }
        return sorted(
            (
                op
                for op in self.operations
                if kind(op) in graph_analysis.SOURCES
                and op._get_control_flow_context() is None
                and gates.level(op) == 0
                and not (op.inputs and op.inputs[0].op in filled)
            ),
            key=lambda op: str(op.name),
        )

    def answer(self, gates: GraphGates) -> Answer | None:
        """How a rank that is out of data takes part in it; None if it can't without data of its
        own.
        """
        if (
            self.trains
            or self.initialized
            or not self.shared
            or any(map(collectives.is_scripts_own, self.operations))
        ):
            return None
        exchanged = sorted(
            (op for op in self.operations if collectives.collective_name(op)),
            key=lambda op: str(op.name),
        )
        feeds: list[tuple[tf.Tensor, Any]] = [
            (gates.gates[level - 1].zero, 0) for level in self.levels(gates)[:1]
        ]
        for op in exchanged:
            request = gates.key_requests.get(collectives.collective_name(op) or "")
            if request is not None:
                ranks = collectives.size()
                feeds += [
                    (request.keys, np.zeros(ranks * request.empty_words, np.int64)),
                    (request.splits, np.full(ranks, request.empty_words, np.int32)),
                ]
        states = [gates.states[name] for name in self.shared if name in gates.states]
        required_operations = graph_analysis.upstream(
            exchanged, {x.name for x, _ in [*feeds, *states]}
        )
        hidden = any(op._get_control_flow_context() is not None for op in exchanged) or any(
            graph_analysis.has_inside(op.graph, op, graph_analysis.is_horovod)
            for op in self.operations
            if op.type in graph_analysis.CALLS
        )
        if hidden or any(
            kind(op) in graph_analysis.SOURCES
            and op._get_control_flow_context() is None
            and gates.level(op) == 0
            for op in required_operations
        ):
            return None
        return Answer(exchanged, feeds, states)

    def exchanged_below(self, gates: GraphGates, level: int) -> list[tf.Operation]:
        """The collectives that must be over before the gate of `level` is settled: those that don't
        wait for it.
        """
        return sorted(
            (
                op
                for op in self.operations
                if (collectives.collective_name(op) or collectives.is_scripts_own(op))
                and op._get_control_flow_context() is None
                and gates.level(op) < level
            ),
            key=lambda op: str(op.name),
        )


def footprint_of(graph: tf.Graph, fetches: Iterable[Any], fed: Iterable[Any]) -> RunFootprint:
    """What running `fetches` executes when `fed` (tensors, or their names) are given.

    Raises:
        Exception: whatever TensorFlow raises for something that isn't in the graph.
    """
    given: set[str] = {name for leaf in fed for name in graph_analysis.tensor_names(leaf)}
    stack: list[tf.Operation] = []
    for leaf in fetches:
        element = graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)
        if isinstance(element, tf.Operation):
            stack.append(element)
        elif element.name not in given:
            stack.append(element.op)
    seen, nothing = required_operations(
        stack, given, [group for group in groups_of(graph) if not group.ahead]
    )
    initialized = tuple(
        v for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES) if v.initializer in seen
    )
    shared = [collectives.collective_name(op) or "" for op in seen] + [
        f"initialize {v.name}" for v in initialized
    ]
    absent = {x.name for x, _ in nothing}
    shared += [
        str(op.name)
        for op in seen
        if str(op.name).startswith(collectives.ALIKE) or collectives.is_scripts_own(op)
    ]
    shared += [
        f"call of {op.name}"
        for op in seen
        if op.type in graph_analysis.CALLS
        and graph_analysis.has_inside(graph, op, graph_analysis.is_horovod)
    ]
    shared += [
        f"lookup {i:03} of {group.name.split('.')[1]}: {member.lookup}"
        for group in groups_of(graph)
        for i, member in enumerate(group.members)
        if member.ids.op in seen and member.ids.name not in absent
    ]
    requests = gates_of(graph).key_requests
    shared += [
        f"{name}: {requests[name].description}"
        for name in shared
        if name in requests and requests[name].description
    ]
    names = tuple(sorted(name for name in shared if name))
    trains = _updates(graph, seen)
    return RunFootprint(
        frozenset(seen), names, _signature(names, trains), initialized, trains, tuple(nothing)
    )


def _signature(names: Iterable[str], trains: bool) -> int:
    digest = hashlib.blake2b("\n".join([*names, str(trains)]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _updates(graph: tf.Graph, operations: Iterable[tf.Operation]) -> bool:
    """Whether any of `operations` writes a global variable, other than to initialize it."""
    variables_ = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    holders = {graph_analysis.memory(v) for v in variables_}
    initializers = {v.initializer for v in variables_}
    for op in operations:
        if op.type in graph_analysis.CALLS:
            if graph_analysis.has_inside(graph, op, graph_analysis.WRITES.match) and any(
                graph_analysis.holder(x) in holders for x in op.inputs
            ):
                return True
        elif (
            op.inputs
            and op not in initializers
            and graph_analysis.WRITES.match(op.type)
            and graph_analysis.holder(op.inputs[0]) in holders
        ):
            return True
    return False
