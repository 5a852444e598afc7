"""Announces every write of tables and slots before it happens, if a consumer follows them.

    an operation that takes a table's handle and may write ──► after CollectiveAnnounceWrites
    a function that does, or a branch ──► as one operation

`ops/native/row_changes.h` says what is announced by whom, and to whom.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.graph import graph_analysis, graph_state, graphs, seen_operations
from collective.ops.graph.sessions import run_unpatched
from collective.ops.rows import row_changes
from collective.tables.table import shard_of
from collective.tensorflow_internals.graphs import op_def_registry

# Operations that take a resource and don't change what it holds.
READERS = frozenset(
    {
        "CollectiveAnnounceWrites",
        "CollectiveGatherRows",
        "CollectiveHoldRows",
        "CollectivePool",
        "CollectiveReduceRows",
        "CollectiveSharedAlltoallKeys",
        "CollectiveWatchShard",
        "DisableCopyOnRead",
        "ReadVariableOp",
        "ReadVariableXlaSplitND",
        "ResourceGather",
        "ResourceGatherNd",
        "VarIsInitializedOp",
        "VariableShape",
    }
)
# Operations that pass on a handle: its consumers take it, too.
_PASSES = graph_analysis.PASSES | {"IdentityN", "Exit", "NextIteration", "Merge"}
_BY_NUMBER = frozenset({"IdentityN"})  # Output i is input i.


@dataclasses.dataclass
class Announcements:
    """Records which writes of a graph are announced.

    Attributes:
        wanted: whether writes of tables and slots are announced.
        announced: operations before which a write is announced, with the numbers of the inputs
            that are the written variables.
        unannounced: the names of variables written by operations that a session had seen before
            their writes were to be announced.
    """

    wanted: bool = False
    announced: set[tuple[tf.Operation, int]] = dataclasses.field(default_factory=set)
    unannounced: set[str] = dataclasses.field(default_factory=set)


def are_wanted(graph: tf.Graph) -> bool:
    """Tells whether writes of the tables and slots of `graph` are announced."""
    return graph_state.of(graph, Announcements).wanted


def want(graph: tf.Graph) -> None:
    """From now on, announces writes of the tables and slots of `graph`.

    Call it before a session runs the graph. If a session has already seen an operation that writes
    a variable, the variable is in `Announcements.unannounced`, and all of it always counts as
    written.

    Raises:
        RuntimeError: the compiled operations are missing.
    """
    reason = native_library.missing()
    if reason is not None:
        raise RuntimeError(
            f"following the changes of tables needs the compiled operations: {reason}."
        )
    graph_state.of(graph, Announcements).wanted = True


def announce(graph: tf.Graph) -> None:
    """Puts an announcement before each operation that may write a table or slot."""
    record, seen = graph_state.of(graph, Announcements), seen_operations.last(graph)
    if not record.wanted:
        return
    for variable in _shards(graph):
        for op, number in _users(variable.handle):
            if (op, number) in record.announced or not _writes(graph, op):
                continue
            record.announced.add((op, number))
            if op._id <= seen:
                record.unannounced.add(variable.op.name)
            else:
                _announce_before(graph, op, number)


def watch(session: Any, variables: Sequence[Any]) -> list[int]:
    """Returns the numbers with which to listen to `variables`, tables or slots, in `session`.

    Raises:
        tf.errors.FailedPreconditionError: a dynamic table isn't initialized.
    """
    with graphs.open_for_changes(session.graph), session.graph.as_default(), tf.init_scope():
        for variable in variables:
            if not hasattr(variable, "_collective_watch"):
                # On a device, nothing announces a table's keys.
                has_store = variable is shard_of(variable) and not getattr(variable, "bridge", None)
                store = getattr(variable, "number", None) if has_store else None
                with tf.control_dependencies(None), tf.name_scope("collective/watch/"):
                    variable._collective_watch = row_changes.watch(variable.handle, store)
    if not variables:
        return []
    numbers = run_unpatched(session, [variable._collective_watch for variable in variables])
    return [int(number) for number in numbers]


def announce_rows(session: Any, variable: Any, rows: np.ndarray) -> None:
    """Announces a write by Python into a table's or slot's memory.

    Args:
        session: whose memory it is.
        variable: the table or slot.
        rows: [K] int64 local rows.
    """
    if are_wanted(session.graph):
        row_changes.announce(watch(session, [variable])[0], rows)


def is_announced(variable: Any) -> bool:
    """Tells whether every write of a table or slot is announced, in its graph's sessions."""
    record = graph_state.of(variable.graph, Announcements)
    return record.wanted and variable.op.name not in record.unannounced


def _shards(graph: tf.Graph) -> Iterator[Any]:
    """Yields the tables and slots of a graph."""
    keys = tf.GraphKeys
    seen = set()
    for key in (keys.GLOBAL_VARIABLES, keys.LOCAL_VARIABLES, keys.TRAINABLE_VARIABLES):
        for variable in graph.get_collection(key):
            if id(variable) not in seen and shard_of(variable) is not None:
                seen.add(id(variable))
                yield variable


def _users(handle: tf.Tensor) -> Iterator[tuple[tf.Operation, int]]:
    """Yields the operations that take a handle, each with the number of the input."""
    stack, seen = [handle], {handle.name}
    while stack:
        tensor = stack.pop()
        for op in tensor.consumers():
            for number, taken in enumerate(op.inputs):
                if taken is not tensor:
                    continue
                if op.type not in _PASSES:
                    yield op, number
                    continue
                handed_on = [op.outputs[number]] if op.type in _BY_NUMBER else list(op.outputs)
                for output in handed_on:
                    if output.dtype == tf.resource and output.name not in seen:
                        seen.add(output.name)
                        stack.append(output)


def _writes(graph: tf.Graph, op: tf.Operation) -> bool:
    """Tells whether an operation that takes a variable's handle may write it, unannounced."""
    if op.type in READERS or op.type in row_changes.SELF_ANNOUNCING:
        return False
    functions = _called_functions(op.node_def)
    return True if not functions else _any_writes(graph, functions)


def _called_functions(node: Any) -> list[str]:
    """Returns the names of the functions that an operation calls."""
    names = []
    for value in node.attr.values():
        names += [value.func.name, *(function.name for function in value.list.func)]
    return [name for name in names if name]


def _any_writes(graph: tf.Graph, names: list[str]) -> bool:
    """Tells whether functions, or what they call, may write a variable that they are given."""
    stack, seen = list(names), set(names)
    while stack:
        function = graph._functions.get(stack.pop())
        if function is None:
            return True  # Unknown.
        for node in function.cached_definition.node_def:
            called = _called_functions(node)
            for name in called:
                if name not in seen:
                    seen.add(name)
                    stack.append(name)
            if called or node.op in READERS or node.op in row_changes.SELF_ANNOUNCING:
                continue
            definition = op_def_registry.get(node.op)
            takes_resource = definition is None or any(
                argument.type == tf.resource.as_datatype_enum for argument in definition.input_arg
            )
            if takes_resource:
                return True
    return False


def _announce_before(graph: tf.Graph, op: tf.Operation, number: int) -> None:
    with (
        graphs.open_for_changes(graph),
        graph.as_default(),
        tf.control_dependencies(None),
        tf.name_scope("collective/announce/"),
    ):
        # It is placed with the operation: in the same branch, or the same loop.
        graph._set_control_flow_context(op._get_control_flow_context())
        with tf.device(op.device or None), graph._original_op(None):
            announced = row_changes.announce_write(op.inputs[number], _rows(op))
    op._add_control_input(announced)


def _rows(op: tf.Operation) -> tf.Tensor | None:
    """Returns the rows that an operation writes; None if it may write all of them."""
    if not op.type.startswith(("ResourceSparseApply", "ResourceScatter", "CollectiveWriteRows")):
        return None
    if op.type.startswith("ResourceScatterNd"):
        return None
    rows = None
    # None of them has a list among its inputs: names and inputs correspond.
    for argument, tensor in zip(op.op_def.input_arg, op.inputs):
        if argument.name == "indices" and tensor.dtype in (tf.int32, tf.int64):
            rows = tensor
    return rows
