"""What a session's run will use, read off the graph: pure, no ranks and no session involved."""
from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variables

from collective.ops import communication
from collective.ops.gate import Check, GraphGates

# What may find its data at an end, or fail for reasons of its own, before any collective of the run has started.
SOURCES = frozenset({
    'IteratorGetNext', 'IteratorGetNextSync', 'OptionalGetValue', 'DatasetToSingleElement', 'DatasetToGraphV2',
    'QueueDequeueV2', 'QueueDequeueManyV2', 'QueueDequeueUpToV2', 'QueueDequeue', 'QueueDequeueMany', 'QueueDequeueUpTo',
    'ReaderReadV2', 'ReaderReadUpToV2', 'Unstage', 'OrderedMapUnstage', 'MapUnstage', 'PyFunc', 'PyFuncStateless',
    'EagerPyFunc', 'MultiDeviceIteratorGetNextFromShard', 'StatefulPartitionedCall', 'PartitionedCall', 'RemoteCall',
    # control flow as a whole, which may hold any of these: in one operation, or where it is left
    'If', 'Case', 'While', 'Merge', 'Exit'})


def flatten(structure: Any) -> list[Any]:
    """The leaves of a session's fetches: lists, tuples, dictionaries (in any order) and composite tensors."""
    if isinstance(structure, dict):
        return [leaf for value in structure.values() for leaf in flatten(value)]
    if isinstance(structure, (list, tuple)) and not isinstance(structure, tf.SparseTensorValue):
        return [leaf for value in structure for leaf in flatten(value)]
    if hasattr(type(structure), '__attrs_attrs__'):
        return [leaf for field in type(structure).__attrs_attrs__ for leaf in flatten(getattr(structure, field.name))]
    if isinstance(structure, variables.Variable):       # whose components would be its handle
        return [structure]
    return [leaf for leaf in tf.nest.flatten(structure, expand_composites=True)]


@dataclasses.dataclass(frozen=True)
class Reach:
    """The part of a graph that a run executes.

    Attributes:
        operations: everything that is executed.
        shared: the names of what all ranks must do alike: its collectives and the variables that it initializes, sorted.
        signature: 63 bits of them, by which ranks compare their runs.
        initialized: the global variables whose initializers run.
    """
    operations: frozenset[tf.Operation]
    shared: tuple[str, ...]
    signature: int
    initialized: tuple[Any, ...]

    def levels(self, gates: GraphGates) -> list[int]:
        """The levels of the gates that it passes, ascending."""
        return [gate.level for gate in gates.gates if gate.zero.op in self.operations]

    def checks(self, gates: GraphGates, level: int) -> list[Check]:
        """The lookups' checks that the gate of `level` waits for."""
        names = set(self.shared)
        return [check for check in gates.checks
                if check.collective in names and gates.level(check.bounds.op) == level - 1]

    def sources(self, gates: GraphGates) -> list[tf.Operation]:
        """The operations that may end or fail before any collective, in the order of their names."""
        # A queue that this run fills behind a gate can't be waited for in front of it.
        filled = {op.inputs[0].op for op in self.operations if 'Enqueue' in op.type and gates.level(op) > 0}
        return sorted((op for op in self.operations if op.type in SOURCES and op._get_control_flow_context() is None
                       and gates.level(op) == 0 and not (op.inputs and op.inputs[0].op in filled)),
                      key=lambda op: str(op.name))

    def exchanged_below(self, gates: GraphGates, level: int) -> list[tf.Operation]:
        """The collectives that must be over before the gate of `level` is settled: those that don't wait for it."""
        return sorted((op for op in self.operations if communication.collective_name(op)
                       and op._get_control_flow_context() is None and gates.level(op) < level),
                      key=lambda op: str(op.name))


def reach(graph: tf.Graph, fetches: Iterable[Any], fed: Iterable[Any]) -> Reach:
    """What running `fetches` executes when `fed` (tensors, or their names) are given.

    Raises:
        Exception: whatever TensorFlow raises for something that isn't in the graph.
    """
    given: set[str] = {name for leaf in fed for name in _tensor_names(leaf)}
    stack: list[tf.Operation] = []
    for leaf in fetches:
        element = graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)
        if isinstance(element, tf.Operation):
            stack.append(element)
        elif element.name not in given:
            stack.append(element.op)
    seen: set[tf.Operation] = set(stack)
    while stack:
        op = stack.pop()
        for upstream in [x.op for x in op.inputs if x.name not in given] + list(op.control_inputs):
            if upstream not in seen:
                seen.add(upstream)
                stack.append(upstream)
    initialized = tuple(v for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES) if v.initializer in seen)
    shared = [communication.collective_name(op) or '' for op in seen] + [f'initialize {v.name}' for v in initialized]
    names = tuple(sorted(name for name in shared if name))
    digest = hashlib.blake2b('\n'.join(names).encode(), digest_size=8).digest()
    return Reach(frozenset(seen), names, int.from_bytes(digest, 'little') >> 1, initialized)


def _tensor_names(leaf: Any) -> Sequence[str]:
    if isinstance(leaf, str):
        return [leaf if ':' in leaf else leaf + ':0']
    if isinstance(leaf, (tf.SparseTensor, tf.IndexedSlices)):
        return [x.name for x in (leaf.indices, leaf.values, leaf.dense_shape) if x is not None]
    return [leaf.name] if hasattr(leaf, 'name') else []


def upstream(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """`operations` and all that they wait for."""
    stack = list(operations)
    seen = set(stack)
    while stack:
        op = stack.pop()
        for before in [x.op for x in op.inputs] + list(op.control_inputs):
            if before not in seen:
                seen.add(before)
                stack.append(before)
    return seen
