"""What a rank alone knows: its data, its random numbers, its local variables, and what is computed
of these.

Read off the graph: pure, no ranks and no session involved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import graph_analysis, graphs
from collective.ops.gate import gates_of
from collective.ops.graph_state import state_of
from collective.ops.op_attributes import kind
from collective.tables.table import is_movable, is_replicated

# whose results all ranks have
REDUCED = re.compile("Horovod(Grouped)?(Allreduce|Allgather)|HorovodBroadcast")
RANDOM = re.compile(
    "Random|TruncatedNormal|Multinomial|Stateful(Uniform|Standard|Random)|.*CandidateSampler"
)
FED = frozenset({"Placeholder", "PlaceholderWithDefault"})
# What reads data, and what may do so in a function.
DATA = graph_analysis.SOURCES - graph_analysis.CALLS - {"Merge", "Exit"} | FED
READS = re.compile(
    "Iterator|OptionalGetValue|Queue|ReaderRead|PyFunc|EagerPyFunc|(Ordered)?(Map)?Unstage"
)
LOCAL_KEYS = (tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES)
# What leaves each number that is fed a number that was fed.
CHANGES = (
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
SHAPED = frozenset({"Reshape", "BroadcastTo", "Tile"})  # by their second input
# Results of a whole batch, if it is their first dimension that they reduce.
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


def replicated(graph: tf.Graph) -> list[Any]:
    """The global variables of `graph` that every rank has alike: neither tables and their slots,
    nor what a script says is each rank's own.
    """
    own = {id(v) for v in _own_variables(graph)}
    return [
        v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if is_replicated(v) and is_movable(v) and id(v) not in own
    ]


def local(graph: tf.Graph) -> list[Any]:
    """The local variables of `graph`, metrics' included."""
    return [v for key in LOCAL_KEYS for v in graph.get_collection(key)]


def _own_variables(graph: tf.Graph) -> list[Any]:
    """Local variables, and those of `VariableSynchronization.ON_READ`."""
    return local(graph) + [
        v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if getattr(v, "synchronization", None) == tf.VariableSynchronization.ON_READ
    ]


class Search:
    """Finds out of many values of a graph which are this rank's own.

    Args:
        graph: that a session runs.
        known: operations that give what all ranks will have.
        drifting: the memory of replicated variables that ranks have changed apart.
        averaged: the memory of variables that all ranks have alike, whatever their script says of
            them.
    """

    def __init__(
        self,
        graph: tf.Graph,
        known: set[tf.Operation],
        drifting: set[tf.Operation],
        averaged: set[tf.Operation],
    ):
        gates = gates_of(graph)
        self._known = (
            state_of(graphs.outermost(graph)).alike_operations
            | known
            | {gate.zero.op for gate in [*gates.gates, gates.ahead] if gate is not None}
        )
        own = {graph_analysis.memory(v) for v in _own_variables(graph)} - averaged | drifting
        listed = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES) + graph.get_collection(
            tf.GraphKeys.TRAINABLE_VARIABLES
        )
        self._variables = {graph_analysis.memory(v) for v in listed} - own
        # found to be, with all that they are computed from
        self._alike: set[tf.Operation] = set()

    def is_own(self, values: Iterable[tf.Tensor]) -> bool:
        """Whether any of `values` comes from what this rank alone knows, other than by a mean.

        A placeholder of a single number is a setting (a rate, a switch), which ranks feed alike; so
        is one without a shape.
        """
        return self._reaches([x.op for x in values], frozenset())

    def is_of_samples(self, values: Iterable[tf.Tensor]) -> bool:
        """Whether any of `values` is own and has numbers of single samples: the state of a
        recurrent network, say, whose mean over ranks would be that of different samples.
        """
        return self._reaches([x.op for x in values if x.shape.rank != 0], AGGREGATES)

    def _reaches(self, stack: list[tf.Operation], stops: frozenset[str]) -> bool:
        seen = set(stack)
        while stack:
            op = stack.pop()
            if (
                op in self._known
                or op in self._alike
                or REDUCED.match(op.type)
                or stops
                and _is_aggregate(op)
            ):
                continue
            new = {x.op for x in op.inputs}
            markers = state_of(graphs.outermost(op.graph)).accumulation_markers
            # in a function: what it is called with
            if op.type == "Placeholder" and graphs.is_function(op.graph):
                captured = {outer.op for outer, inner in op.graph.captures if inner.op is op}
                if not captured:
                    return True
                new = captured
            elif op not in markers and self._is_source(op):
                return True
            stack.extend(new - seen)
            seen |= new
        if not stops:
            self._alike |= seen
        return False

    def _is_source(self, op: tf.Operation) -> bool:
        if op.type in graph_analysis.VARIABLE_TYPES:
            return op not in self._variables and not str(op.name).startswith("collective/")
        # of a loop that is being built, whose later values come from where nobody has been yet
        if op.type == "Merge":
            context = op._get_control_flow_context()
            return (
                context is not None
                and bool(context.IsWhileContext())
                and not any(x.op.type == "NextIteration" for x in op.inputs)
            )
        if op.type in FED and not op.outputs[0].shape.rank:
            return False
        if RANDOM.match(op.type):  # all ranks draw the same of a seed
            return not (
                "seed" in op.node_def.attr and (op.get_attr("seed") or op.get_attr("seed2"))
            )
        return (
            op.type in graph_analysis.CALLS
            and graph_analysis.has_inside(op.graph, op, RANDOM.match)
            or takes_data(op)
        )


def takes_data(op: tf.Operation) -> bool:
    return (
        kind(op) in DATA
        or op.type in graph_analysis.CALLS
        and graph_analysis.has_inside(op.graph, op, READS.match)
    )


def is_fed(value: tf.Tensor) -> bool:
    """Whether it is what a script feeds, at most put into another form: the script's to choose."""
    stack, fed = [value.op], False
    seen = set(stack)
    while stack:
        op = stack.pop()
        if op.type not in CHANGES and op.type not in FED or graphs.is_function(op.graph):
            return False
        fed = fed or op.type == "Placeholder"
        new = {x.op for x in (op.inputs[:1] if op.type in SHAPED else op.inputs)} - seen
        seen |= new
        stack.extend(new)
    return fed


def _is_aggregate(op: tf.Operation) -> bool:
    """Whether its result is of a batch, whose samples are the first dimension of what it takes."""
    if op.type in AGGREGATES:
        return True
    if op.type == "MatMul":
        return bool(op.get_attr("transpose_a")) or op.inputs[0].op.type == "Transpose"
    if op.type not in REDUCTIONS:
        return False
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    return rank is None or axes is None or 0 in axes.reshape(-1) or -rank in axes.reshape(-1)
