"""What a session's run will use, read off the graph: pure, no ranks and no session involved."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variables

from collective.ops import communication
from collective.ops.gate import Check, GraphGates, gates_of
from collective.ops.operations import attribute, kind
from collective.strategies.together import Group, groups_of

# What may find its data at an end, or fail for reasons of its own, before any collective of the run
# has started.
SOURCES = frozenset(
    {
        "IteratorGetNext",
        "IteratorGetNextSync",
        "OptionalGetValue",
        "DatasetToSingleElement",
        "DatasetToGraphV2",
        "QueueDequeueV2",
        "QueueDequeueManyV2",
        "QueueDequeueUpToV2",
        "QueueDequeue",
        "QueueDequeueMany",
        "QueueDequeueUpTo",
        "ReaderReadV2",
        "ReaderReadUpToV2",
        "Unstage",
        "OrderedMapUnstage",
        "MapUnstage",
        "PyFunc",
        "PyFuncStateless",
        "EagerPyFunc",
        "MultiDeviceIteratorGetNextFromShard",
        "StatefulPartitionedCall",
        "PartitionedCall",
        "RemoteCall",
        # control flow as a whole, which may hold any of these: in one operation, or where it is
        # left
        "If",
        "Case",
        "While",
        "Merge",
        "Exit",
    }
)
CALLS = frozenset(
    {
        "If",
        "StatelessIf",
        "Case",
        "While",
        "StatelessWhile",
        "StatefulPartitionedCall",
        "PartitionedCall",
    }
)


def flatten(structure: Any) -> list[Any]:
    """The leaves of a session's fetches: lists, tuples, dictionaries (in any order) and composite
    tensors.
    """
    if isinstance(structure, dict):
        return [leaf for value in structure.values() for leaf in flatten(value)]
    if isinstance(structure, (list, tuple)) and not isinstance(structure, tf.SparseTensorValue):
        return [leaf for value in structure for leaf in flatten(value)]
    if hasattr(type(structure), "__attrs_attrs__"):
        return [
            leaf
            for field in type(structure).__attrs_attrs__
            for leaf in flatten(getattr(structure, field.name))
        ]
    if isinstance(structure, variables.Variable):  # whose components would be its handle
        return [structure]
    return [leaf for leaf in tf.nest.flatten(structure, expand_composites=True)]


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
class Reach:
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

    def alike(self, names: Iterable[str]) -> Reach:
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
                if kind(op) in SOURCES
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
            or any(map(communication.is_scripts_own, self.operations))
        ):
            return None
        exchanged = sorted(
            (op for op in self.operations if communication.collective_name(op)),
            key=lambda op: str(op.name),
        )
        feeds: list[tuple[tf.Tensor, Any]] = [
            (gates.gates[level - 1].zero, 0) for level in self.levels(gates)[:1]
        ]
        for op in exchanged:
            asked = gates.asked.get(communication.collective_name(op) or "")
            if asked is not None:
                ranks = communication.size()
                feeds += [
                    (asked.keys, np.zeros(ranks * asked.nothing, np.int64)),
                    (asked.splits, np.full(ranks, asked.nothing, np.int32)),
                ]
        states = [gates.states[name] for name in self.shared if name in gates.states]
        needed = upstream(exchanged, {x.name for x, _ in [*feeds, *states]})
        hidden = any(op._get_control_flow_context() is not None for op in exchanged) or any(
            has_inside(op.graph, op, COLLECTIVES) for op in self.operations if op.type in CALLS
        )
        if hidden or any(
            kind(op) in SOURCES and op._get_control_flow_context() is None and gates.level(op) == 0
            for op in needed
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
                if (communication.collective_name(op) or communication.is_scripts_own(op))
                and op._get_control_flow_context() is None
                and gates.level(op) < level
            ),
            key=lambda op: str(op.name),
        )


def reach(graph: tf.Graph, fetches: Iterable[Any], fed: Iterable[Any]) -> Reach:
    """What running `fetches` executes when `fed` (tensors, or their names) are given.

    Raises:
        Exception: whatever TensorFlow raises for something that isn't in the graph.
    """
    given: set[str] = {name for leaf in fed for name in tensor_names(leaf)}
    stack: list[tf.Operation] = []
    for leaf in fetches:
        element = graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)
        if isinstance(element, tf.Operation):
            stack.append(element)
        elif element.name not in given:
            stack.append(element.op)
    seen, nothing = needed(stack, given, [group for group in groups_of(graph) if not group.ahead])
    initialized = tuple(
        v for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES) if v.initializer in seen
    )
    shared = [communication.collective_name(op) or "" for op in seen] + [
        f"initialize {v.name}" for v in initialized
    ]
    absent = {x.name for x, _ in nothing}
    shared += [
        str(op.name)
        for op in seen
        if str(op.name).startswith(communication.ALIKE) or communication.is_scripts_own(op)
    ]
    shared += [
        f"call of {op.name}"
        for op in seen
        if op.type in CALLS and has_inside(graph, op, COLLECTIVES)
    ]
    shared += [
        f"lookup {i:03} of {group.name.split('.')[1]}: {member.lookup}"
        for group in groups_of(graph)
        for i, member in enumerate(group.members)
        if member.ids.op in seen and member.ids.name not in absent
    ]
    asked = gates_of(graph).asked
    shared += [
        f"{name}: {asked[name].what}" for name in shared if name in asked and asked[name].what
    ]
    names = tuple(sorted(name for name in shared if name))
    trains = _updates(graph, seen)
    return Reach(
        frozenset(seen), names, _signature(names, trains), initialized, trains, tuple(nothing)
    )


def _signature(names: Iterable[str], trains: bool) -> int:
    digest = hashlib.blake2b("\n".join([*names, str(trains)]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# Operations that write the variable which is their first input (a reference, or a resource).
WRITES = re.compile(
    "(Resource(Sparse)?Apply|CollectiveSparse|ResourceScatter|ResourceStridedSliceAssign|ResourceCountUpTo|"
    "Assign|(Sparse)?Apply|Scatter|CountUpTo)"
)
PASSES = frozenset({"Identity", "Enter", "Switch", "RefIdentity", "RefEnter", "RefSwitch"})
COLLECTIVES = re.compile("Horovod")


def _updates(graph: tf.Graph, operations: Iterable[tf.Operation]) -> bool:
    """Whether any of `operations` writes a global variable, other than to initialize it."""
    variables_ = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    holders = {memory(v) for v in variables_}
    initializers = {v.initializer for v in variables_}
    for op in operations:
        if op.type in CALLS:
            if has_inside(graph, op, WRITES) and any(holder(x) in holders for x in op.inputs):
                return True
        elif (
            op.inputs
            and op not in initializers
            and WRITES.match(op.type)
            and holder(op.inputs[0]) in holders
        ):
            return True
    return False


def memory(variable: Any) -> tf.Operation:
    """The operation that has `variable`."""
    found: tf.Operation = (variable.handle if hasattr(variable, "handle") else variable).op
    return found


def holder(x: tf.Tensor) -> tf.Operation:
    """The operation that has the variable to which `x` refers, if it refers to one."""
    while x.op.type in PASSES:
        x = x.op.inputs[0]
    return x.op


def has_inside(graph: tf.Graph, op: tf.Operation, types: re.Pattern[str]) -> bool:
    """Whether a function that `op` calls, or one that this calls, has operations of `types`."""
    stack, seen = [op.node_def], set()
    while stack:
        for value in stack.pop().attr.values():
            for name in [value.func.name, *(f.name for f in value.list.func)]:
                function = graph._functions.get(name) if name and name not in seen else None
                seen.add(name)
                nodes = list(function.cached_definition.node_def) if function is not None else []
                if any(types.match(node.op) for node in nodes):
                    return True
                stack += nodes
    return False


def tensor_names(leaf: Any) -> Sequence[str]:
    if isinstance(leaf, str):
        return [leaf if ":" in leaf else leaf + ":0"]
    return [x.name for x in flatten(leaf) if hasattr(x, "name")]


def upstream(operations: Iterable[tf.Operation], fed: Set[str] = frozenset()) -> set[tf.Operation]:
    """`operations` and all that they wait for; what comes before the tensors named in `fed` is not
    waited for.
    """
    return needed(operations, fed, [])[0]


def needed(
    operations: Iterable[tf.Operation], fed: Set[str], groups: Sequence[Group]
) -> tuple[set[tf.Operation], list[tuple[tf.Tensor, np.ndarray]]]:
    """(`operations` and all that they wait for, what to feed for the lookups of `groups` that they
    don't need).

    A group's exchange waits for the inputs of all its lookups. But one whose rows reach nothing,
    neither forward nor by its gradient, isn't needed: nothing is looked up for it, and what its
    inputs come from isn't run.
    """
    members = [(group, i, member) for group in groups for i, member in enumerate(group.members)]
    inputs = {
        x.op: at
        for at, (_, _, member) in enumerate(members)
        for x in (member.ids, member.samples, member.weights)
        if x is not None
    }
    # Every operation that pools, forward or backward, has the group's positions as its second
    # input.
    outputs = {(group.pool.inputs[1].name, i): at for at, (group, i, _) in enumerate(members)}
    held: dict[int, list[tf.Operation]] = {}
    wanted: set[int] = set()
    stack = list(operations)
    seen = set(stack)

    def want(at: int | None) -> None:
        if at is not None and at not in wanted:
            wanted.add(at)
            stack.extend(held.pop(at, []))

    while stack:
        op = stack.pop()
        at = inputs.get(op)
        if at is not None and at not in wanted:
            held.setdefault(at, []).append(op)
            continue
        if outputs and kind(op) == "CollectivePoolGradient":
            for i in attribute(op, "members"):
                want(outputs.get((op.inputs[1].name, i)))
        before = [x for x in op.inputs if x.name not in fed]
        for x in before:
            if outputs and kind(x.op) == "CollectivePool":
                want(outputs.get((x.op.inputs[1].name, x.value_index)))
        for upper in [x.op for x in before] + list(op.control_inputs):
            if upper not in seen:
                seen.add(upper)
                stack.append(upper)
    return seen, [feed for at in held for feed in members[at][2].nothing()]
