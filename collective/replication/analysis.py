"""Finds out which values of a graph are the same on all ranks, and which are a rank's own.

A rank's data, random numbers and local variables, and everything computed from them, are
rank-local. The graph determines all of this: the functions are pure and need no session.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.graph import graph_analysis, graph_state, graphs
from collective.tables.served_table import served_graph
from collective.tables.table import is_movable, is_replicated

# Kinds of collectives whose results all ranks have.
REDUCED = frozenset({"Allreduce", "Allgather", "Broadcast"})
RANDOM = re.compile(
    "Random|TruncatedNormal|Multinomial|Stateful(Uniform|Standard|Random)|.*CandidateSampler"
)
# Operations that read data, and those that may do so in a function.
DATA = graph_analysis.SOURCES - graph_analysis.CALLS - {"Merge", "Exit"} | graph_analysis.FED
READS = re.compile(
    "Iterator|OptionalGetValue|Queue|ReaderRead|PyFunc|EagerPyFunc|(Ordered)?(Map)?Unstage"
)
# How the names of what the library makes for itself begin.
LIBRARY = "collective/"
LOCAL_KEYS = (tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES)
# Operations that put what is fed into another form.
CHANGES_OF_FORM = (
    frozenset(
        {
            "Const",
            "Cast",
            "Reshape",
            "ExpandDims",
            "Squeeze",
            "Transpose",
            "ConcatV2",
            "Pack",
            "Slice",
            "StridedSlice",
            "Tile",
            "Fill",
            "Mul",
            "AddV2",
            "Sub",
            "RealDiv",
            "Neg",
            "BroadcastTo",
        }
    )
    | graph_analysis.PASSES
)
# Their second input is a shape.
SHAPED = frozenset({"Reshape", "BroadcastTo", "Tile"})
# Operations whose results are of a whole batch if they reduce its first dimension.
REDUCTIONS = frozenset({"Mean", "Sum", "Max", "Min", "Prod", "Any", "All", "EuclideanNorm"})
AGGREGATES = frozenset(
    {
        "L2Loss",
        "Size",
        "Shape",
        "Bincount",
        "DenseBincount",
        "FusedBatchNorm",
        "FusedBatchNormV2",
        "FusedBatchNormV3",
        "SegmentSum",
        "SegmentMean",
        "UnsortedSegmentSum",
        "UnsortedSegmentMax",
    }
)


def has_replicas(graph: tf.Graph) -> bool:
    """Tells whether several ranks have replicas of a graph's variables, and keep them equal.

    A graph that is built for serving has none, and neither have variables that are made eagerly.
    """
    is_eager = tf.executing_eagerly_outside_functions()
    return collectives.size() > 1 and not is_eager and served_graph(graph) is None


def replicated_variables(graph: tf.Graph) -> list[Any]:
    """Returns the global variables of `graph` that are the same on every rank.

    They don't include tables and their slots, or variables that a script marks as each rank's own.
    """
    rank_local = {id(v) for v in _rank_local_variables(graph)}
    return [
        v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if is_replicated(v) and is_movable(v) and id(v) not in rank_local
    ]


def local_variables(graph: tf.Graph) -> list[Any]:
    """Returns the local variables of `graph`, metrics' included."""
    return [v for key in LOCAL_KEYS for v in graph.get_collection(key)]


def _rank_local_variables(graph: tf.Graph) -> list[Any]:
    """Returns local variables, and those of `VariableSynchronization.ON_READ`."""
    return local_variables(graph) + [
        v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if getattr(v, "synchronization", None) == tf.VariableSynchronization.ON_READ
    ]


@dataclasses.dataclass
class ShownMeans:
    """Records operations that show a script the means of gradients over several batches."""

    operations: set[tf.Operation] = dataclasses.field(default_factory=set)


def note_shown_means(operations: Iterable[tf.Operation]) -> None:
    """Notes that `operations` show a script the means of gradients over several batches."""
    for op in operations:
        graph_state.of(graphs.outermost(op.graph), ShownMeans).operations.add(op)


class ReplicationAnalysis:
    """Tells which values of a graph are rank-local.

    Args:
        graph: a graph that a session runs.
        synced: operations whose results are, or will be, the same on all ranks.
        drifting: the memory of replicated variables that ranks have changed differently.
        averaged: the memory of variables that are the same on all ranks, whatever the script says
            about them.
    """

    def __init__(
        self,
        graph: tf.Graph,
        synced: set[tf.Operation],
        drifting: set[tf.Operation],
        averaged: set[tf.Operation],
    ):
        gates = gates_of(graph)
        all_gates = [gate for gate in [*gates.gates, gates.prefetch_gate] if gate is not None]
        outermost = graphs.outermost(graph)
        self._shown_means = graph_state.of(outermost, ShownMeans).operations
        replicated = collectives.replicated_operations(outermost)
        self._synced = replicated | synced | {gate.zero.op for gate in all_gates}
        rank_local = {graph_analysis.memory(v) for v in _rank_local_variables(graph)}
        variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        variables += graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
        self._replicated_memory = {graph_analysis.memory(v) for v in variables}
        self._replicated_memory -= (rank_local - averaged) | drifting
        # Operations found to give the same on all ranks, with all that they are computed from.
        self._replicated: set[tf.Operation] = set()

    def is_rank_local(self, values: Iterable[tf.Tensor]) -> bool:
        """Tells whether any of `values` depends on rank-local values, other than by a mean.

        A placeholder of a single number is a setting (a rate, a switch), for which all ranks feed
        the same; so is one without a shape.
        """
        return self._reaches_source([x.op for x in values], per_sample=False)

    def is_per_sample(self, values: Iterable[tf.Tensor]) -> bool:
        """Tells whether any of `values` is rank-local and has numbers of single samples.

        The state of a recurrent network is an example: its mean over ranks would be that of
        different samples.
        """
        return self._reaches_source([x.op for x in values if x.shape.rank != 0], per_sample=True)

    def _reaches_source(self, operations: list[tf.Operation], per_sample: bool) -> bool:
        """Walks up from `operations` until it finds something rank-local.

        Args:
            operations: where the walk starts.
            per_sample: stops at results of whole batches, too.
        """
        reached = False

        def stop(op: tf.Operation) -> bool:
            nonlocal reached
            is_reduced = graph_analysis.collective_kind(op.type) in REDUCED
            if op in self._synced or op in self._replicated or is_reduced:
                return True
            if per_sample and _is_of_batch(op):
                return True
            reached = reached or self._is_source(op)
            return reached

        walked = graph_analysis.walk(operations, _producers, stop, control=False)
        if not reached and not per_sample:
            self._replicated |= walked
        return reached

    def _is_source(self, op: tf.Operation) -> bool:
        """Tells whether `op` brings in something rank-local by itself."""
        if _is_argument(op):
            return not _captured(op)
        if op in self._shown_means:
            return False
        if op.type in graph_analysis.VARIABLE_TYPES:
            is_librarys = str(op.name).startswith(LIBRARY)
            return op not in self._replicated_memory and not is_librarys
        if op.type == "Merge":
            # That of a loop which is still being built: the source of its later values isn't known
            # yet.
            context = op._get_control_flow_context()
            return (
                context is not None
                and bool(context.IsWhileContext())
                and not any(x.op.type == "NextIteration" for x in op.inputs)
            )
        if op.type in graph_analysis.FED and not op.outputs[0].shape.rank:
            return False
        if RANDOM.match(op.type):
            # With a seed all ranks draw the same.
            has_seed = "seed" in op.node_def.attr and (op.get_attr("seed") or op.get_attr("seed2"))
            return not has_seed
        if op.type in graph_analysis.CALLS and graph_analysis.has_inside(
            op.graph, op, RANDOM.match
        ):
            return True
        return takes_data(op)


def _is_argument(op: tf.Operation) -> bool:
    """Tells whether `op` is what a function is called with."""
    return op.type == "Placeholder" and graphs.is_function(op.graph)


def _captured(argument: tf.Operation) -> set[tf.Operation]:
    """Returns what a function has captured as this argument; nothing for its other arguments."""
    return {outer.op for outer, inner in argument.graph.captures if inner.op is argument}


def _producers(op: tf.Operation) -> Iterable[tf.Operation]:
    return _captured(op) if _is_argument(op) else [x.op for x in op.inputs]


def takes_data(op: tf.Operation) -> bool:
    """Tells whether `op`, or a function that it calls, reads data."""
    if op.type in DATA:
        return True
    return op.type in graph_analysis.CALLS and graph_analysis.has_inside(op.graph, op, READS.match)


def is_fed(value: tf.Tensor) -> bool:
    """Tells whether `value` is fed by a script, at most in another form.

    Such a value is the script's to choose.
    """

    def changes_form(op: tf.Operation) -> bool:
        return (
            op.type in CHANGES_OF_FORM or op.type in graph_analysis.FED
        ) and not graphs.is_function(op.graph)

    def numbers(op: tf.Operation) -> list[tf.Operation]:
        return [x.op for x in (op.inputs[:1] if op.type in SHAPED else op.inputs)]

    walked = graph_analysis.walk(
        [value.op], numbers, lambda op: not changes_form(op), control=False
    )
    return all(map(changes_form, walked)) and any(op.type == "Placeholder" for op in walked)


def _is_of_batch(op: tf.Operation) -> bool:
    """Tells whether `op` gives a result of a batch, the first dimension of its input."""
    if op.type in AGGREGATES:
        return True
    if op.type == "MatMul":
        return bool(op.get_attr("transpose_a")) or op.inputs[0].op.type == "Transpose"
    if op.type not in REDUCTIONS:
        return False
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    return rank is None or axes is None or 0 in axes.reshape(-1) or -rank in axes.reshape(-1)
