"""Reads graphs: what operations wait for, which functions they call, which variables they write."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.tensorflow_internals.graphs import attr_value_pb2
from collective.tensorflow_internals.variables import variables

# Operations that may reach the end of their data, or fail for reasons of their own, before any
# collective of the run has started.
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
        # Control flow may hold any of these: as one operation, or at its exit.
        "If",
        "Case",
        "While",
        "Merge",
        "Exit",
    }
)

# Operations whose values a run may feed.
FED = frozenset({"Placeholder", "PlaceholderWithDefault"})

# Operations that give other values each time they run; they must not run without need.
_DRAWS = re.compile("(Random|TruncatedNormal|Multinomial|.*CandidateSampler)")

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
    """Returns the leaves of a session's fetches.

    These may be lists, tuples, dictionaries (in any order) and composite tensors.
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
    if isinstance(structure, variables.Variable):  # Its component would be its handle.
        return [structure]
    if isinstance(structure, tf.IndexedSlices):
        # TensorFlow uses it to fetch any tensors, but they have to match to be described as its
        # type.
        parts = (structure.values, structure.indices, structure.dense_shape)
        return [part for part in parts if part is not None]
    return list(tf.nest.flatten(structure, expand_composites=True))


# Operations that write the variable that is their first input (a reference, or a resource).
WRITES = re.compile(
    "(Resource(Sparse)?Apply|CollectiveSparse|CollectiveWriteRows|ResourceScatter|ResourceStridedSliceAssign|ResourceCountUpTo|Assign|(Sparse)?Apply|Scatter|CountUpTo)"
)

# The operations that hold a variable.
VARIABLE_TYPES = frozenset({"VarHandleOp", "VariableV2", "Variable"})

# Operations that give a variable another value, whatever it was before.
ASSIGNS = frozenset({"Assign", "AssignVariableOp"})

# Operations that pass a reference to a variable on.
PASSES = frozenset({"Identity", "Enter", "Switch", "RefIdentity", "RefEnter", "RefSwitch"})

# The beginnings of carriers' types of operations: Horovod, shared memory, and NCCL.
_CARRIER = re.compile("Horovod|CollectiveShared|CollectiveNccl")
_NOTE = "_collective_note"
_COLLECTIVE = re.compile(
    f"({_CARRIER.pattern})((Grouped)?(Allreduce|Allgather|Reducescatter)|Broadcast|Alltoall)"
)


def is_of_carrier(op_type: str) -> bool:
    """Tells whether operations of this type belong to a carrier: Horovod, shared memory or NCCL.

    Besides collectives, Horovod has operations that return the rank.
    """
    return bool(_CARRIER.match(op_type))


def collective_kind(op_type: str) -> str:
    """Returns 'Alltoall', 'Allreduce', 'Allgather', 'Broadcast', or any other type unchanged."""
    match = _COLLECTIVE.match(op_type)
    return op_type if match is None else re.sub("^Grouped", "", match[2])


def is_collective(op_type: str) -> bool:
    """Tells whether operations of this type wait for their peers on the other ranks."""
    return bool(_COLLECTIVE.match(op_type))


def memory(variable: Any) -> tf.Operation:
    """Returns the operation that holds `variable`."""
    operation: tf.Operation = (variable.handle if hasattr(variable, "handle") else variable).op
    return operation


def holder(x: tf.Tensor) -> tf.Operation:
    """Returns the operation that holds the variable to which `x` refers, if it refers to one."""
    while x.op.type in PASSES:
        x = x.op.inputs[0]
    return x.op


def mark_note(op: tf.Operation) -> None:
    """Marks a write that notes what a run has used: it isn't an update, not even in a function."""
    op._set_attr(_NOTE, attr_value_pb2.AttrValue(b=True))


def has_inside(graph: tf.Graph, op: tf.Operation, is_sought: Callable[[str], object]) -> bool:
    """Tells whether a function that `op` calls, at any depth, has an operation of a sought type.

    Operations that `mark_note` has marked don't count.
    """
    return any(is_sought(node.op) for node in nodes_inside(graph, op) if _NOTE not in node.attr)


def nodes_inside(graph: tf.Graph, op: tf.Operation) -> Iterator[Any]:
    """Yields the NodeDefs of the functions that `op` calls, at any depth."""
    stack, seen = [op.node_def], set()
    while stack:
        for value in stack.pop().attr.values():
            for name in [value.func.name, *(f.name for f in value.list.func)]:
                function = graph._functions.get(name) if name and name not in seen else None
                seen.add(name)
                nodes = list(function.cached_definition.node_def) if function is not None else []
                yield from nodes
                stack += nodes


def tensor_names(leaf: Any) -> Sequence[str]:
    """Returns the names of the tensors of one leaf of fetches or feeds."""
    if isinstance(leaf, str):
        return [leaf if ":" in leaf else leaf + ":0"]
    return [x.name for x in flatten(leaf) if hasattr(x, "name")]


def upstream(operations: Iterable[tf.Operation], fed: Set[str] = frozenset()) -> set[tf.Operation]:
    """Returns `operations` and all operations that they wait for.

    Args:
        operations: where the walk starts.
        fed: names of fed tensors, whose producers are not waited for.
    """
    return walk(operations, lambda op: [x.op for x in op.inputs if x.name not in fed])


def gives_other_values(op_type: str) -> bool:
    """Tells whether an operation of this type must be fed, or returns other values in each run."""
    return op_type == "Placeholder" or op_type in SOURCES or bool(_DRAWS.match(op_type))


def marks_upstream(
    operations: Iterable[tf.Operation],
    marks: Mapping[tf.Operation, int],
    within: Set[tf.Operation] | None = None,
) -> dict[tf.Operation, int]:
    """Returns for each of `operations`, and for all operations that they wait for, its upstream
    marks.

    Args:
        operations: where the walk starts.
        marks: the bits of some operations.
        within: the walk stays in these operations; None: it goes everywhere.

    Returns:
        For each operation, the bits of all operations that it waits for, without its own bits.
    """
    upstream_marks: dict[tf.Operation, int] = {}
    stack, entered = list(operations), set()
    while stack:
        op = stack[-1]
        producers = [x.op for x in op.inputs] + list(op.control_inputs)
        if within is not None:
            producers = [x for x in producers if x in within]
        if op not in entered:
            entered.add(op)
            stack.extend(x for x in producers if x not in entered)
            continue
        stack.pop()
        if op not in upstream_marks:
            found = 0
            for x in producers:
                # An input without marks so far is reached by the back edge of a loop.
                found |= upstream_marks.get(x, 0) | marks.get(x, 0)
            upstream_marks[op] = found
    return upstream_marks


def walk(
    operations: Iterable[tf.Operation],
    inputs: Callable[[tf.Operation], Iterable[tf.Operation]] | None = None,
    stop: Callable[[tf.Operation], bool] | None = None,
    control: bool = True,
) -> set[tf.Operation]:
    """Returns `operations` and all operations found by walking upstream from them.

    Args:
        operations: where the walk starts.
        inputs: returns the producers of an operation's inputs; by default all of them.
        stop: tells whether the walk ends at an operation, which is still included.
        control: whether to walk control inputs, too.
    """
    reached = set(operations)
    stack = list(reached)
    while stack:
        op = stack.pop()
        if stop is not None and stop(op):
            continue
        producers = [x.op for x in op.inputs] if inputs is None else list(inputs(op))
        if control:
            producers += op.control_inputs
        for producer in producers:
            if producer not in reached:
                reached.add(producer)
                stack.append(producer)
    return reached


def level(
    op: tf.Operation,
    levels: dict[tf.Operation, int],
    exchanges: Mapping[tf.Operation, Sequence[tf.Operation]] = types.MappingProxyType({}),
) -> int:
    """Returns the level of `op`: the highest level of its inputs, plus one if it is an exchange.

    A plain walk of the graph isn't enough: an operation's level depends on those of its inputs.

    Args:
        op: the operation.
        levels: the known levels; the levels of operations upstream of `op` are added.
        exchanges: the operations that each exchange waits for, by the operation that provides it.
    """
    stack, entered = [op], set()
    while stack:
        top = stack[-1]
        upstream = (
            list(exchanges[top])
            if top in exchanges
            else [x.op for x in top.inputs] + list(top.control_inputs)
        )
        if top not in levels and top not in entered:
            entered.add(top)
            stack.extend(o for o in upstream if o not in levels and o not in entered)
            continue
        # An input without a level so far is reached by the back edge of a loop, and is on the
        # stack.
        levels.setdefault(
            top, max((levels.get(o, 0) for o in upstream), default=0) + (top in exchanges)
        )
        stack.pop()
    return levels[op]
