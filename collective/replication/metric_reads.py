"""Makes reads of a metric's state return that of all ranks.

A script reads a state to compute the metric's value, and to update it:

    x ──► assign_add ──► state ──► read ──► value          (a sum)
    x ──► maximum ──► assign ──► state ──► read ──► value  (a largest value)
             ▲                     │
             └──────── read ◄──────┘

Before a session runs the graph, operations that compute a value get the reduced states instead of
this rank's. Operations that update the state still use this rank's. If ranks' states can't be
combined, operations that read them are refused when they are run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.coordination.reduced_reads import reads_of
from collective.ops.communication import collectives, fused_reductions, gate
from collective.ops.communication.fused_reductions import Reduction, of_all_ranks
from collective.ops.graph import (
    device_scopes,
    graph_analysis,
    graph_state,
    graphs,
    seen_operations,
)
from collective.replication import metric_states, metrics
from collective.replication.analysis import has_replicas, takes_data
from collective.replication.metric_states import MetricState

SCOPE = "collective/states"


class _Use(NamedTuple):
    """Stands for an operation that computes something from a state.

    Attributes:
        op: the operation.
        place: which of its inputs the state is.
        read: that input.
    """

    op: tf.Operation
    place: int
    read: tf.Tensor


@dataclasses.dataclass
class MetricReads:
    """Records the metrics' states of one graph.

    Attributes:
        version: the graph's version when the states were looked for last.
        by_name: the states, by the names of tensors that have them as they are on this rank.
        warned: the names of variables of which a warning has been given.
    """

    version: int | None = None
    by_name: dict[str, MetricState] = dataclasses.field(default_factory=dict)
    warned: set[str] = dataclasses.field(default_factory=set)


def reduce_reads(graph: tf.Graph) -> None:
    """Finds the operations that read metrics' states, and gives them those of all ranks."""
    if not has_replicas(graph) or not metric_states.metric_variables(graph):
        return
    known = graph_state.of(graph, MetricReads)
    if known.version == graph.version:
        return
    states = metric_states.states_of(graph)
    known.by_name = {x.name: each for each in states for x in each.reads}
    too_early = _too_early(graph)
    wanted: list[_Use] = []
    refused: dict[Any, str] = {}
    for each in states:
        uses = _uses(each)
        if each.obstacle:
            _refuse(refused, each, uses)
        elif each.reduction is not None:
            _warn_of_reads_inside(known, each, uses)
            _warn_of_saves(known, each)
            wanted += _reducible(graph, refused, each, uses, too_early)
    with _adding_to(graph):
        for use in wanted:
            use.op._update_input(use.place, _reduced(use.read, known))
        for each in states:
            if each.reduction is Reduction.SUM:
                _start_on_rank_0(graph, refused, each)
        if wanted:
            gate.gates_of(graph).changed()
    reads = reads_of(graph)
    if refused != reads.refused:
        reads.refused, reads.refusals = refused, reads.refusals + 1
    known.version = graph.version


def reduce_fetched(graph: tf.Graph, leaves: Iterable[Any]) -> None:
    """Reduces the states that are fetched directly."""
    known = graph_state.of(graph, MetricReads)
    if not known.by_name:
        return
    reduced, reads = reads_of(graph).wholes, {}
    for leaf in leaves:
        try:
            x = graph.as_graph_element(leaf)
        except (TypeError, ValueError, KeyError):
            return  # TensorFlow refuses it itself
        if isinstance(x, tf.Tensor) and x.name not in reduced and x.name in known.by_name:
            each = known.by_name[x.name]
            if each.reduction is not None and x.op._get_control_flow_context() is None:
                reads[x.name] = x
    if not reads:
        return
    with _adding_to(graph):
        # Ranks may fetch in any order.
        for _, x in sorted(reads.items()):
            _reduced(x, known)
    fused_reductions.fuse(graph)


def refusal_of(values: Iterable[Any]) -> str | None:
    """Returns why a metric of these values can't be that of all ranks; None if it can."""
    for value in values:
        graph = value.graph
        refused, element = reads_of(graph).refused, graph.as_graph_element(value)
        is_tensor = isinstance(element, tf.Tensor)
        if is_tensor and element.name in refused:
            return refused[element.name]
        upstream = graph_analysis.walk([element.op if is_tensor else element], control=False)
        for op in sorted(upstream, key=lambda op: op._id):
            if op in refused:
                return refused[op]
    return None


# What looks at a state


def _is_ours(op: tf.Operation) -> bool:
    return SCOPE in op.name or fused_reductions.SCOPE in op.name


def _uses(each: MetricState) -> list[_Use]:
    """Returns the operations that compute something from a state, other than to update it."""
    found = []
    for read in each.reads:
        is_reference = bool(read.dtype._is_ref_dtype)
        for op, place in metric_states.users(read):
            updates = op in each.own_updates or (
                is_reference
                and (
                    op.type in graph_analysis.PASSES
                    or (place == 0 and graph_analysis.WRITES.match(op.type))
                )
            )
            if not updates and not metric_states.is_aside(op) and not _is_ours(op):
                found.append(_Use(op, place, read))
    return [use for use in found if not metric_states.is_saved(use.op)]


def _reducible(
    graph: tf.Graph,
    refused: dict[Any, str],
    each: MetricState,
    uses: Sequence[_Use],
    too_early: set[tf.Operation],
) -> list[_Use]:
    """Returns the uses that can be given the reduced state, and refuses the others."""
    reducible = []
    for use in uses:
        if use.read.op._get_control_flow_context() is not None:
            continue
        if metrics.SCOPE in use.op.name:
            if each.reduction is not Reduction.SUM:
                _refuse_use(refused, use.op, each, "is no sum, but is summed there")
        elif use.op in too_early:
            refused[use.op] = (
                f"'{use.op.name}' reads the metric variable '{each.name}' for ids of a lookup, or "
                "for a queue: ranks have no common value of it there. Feed the ids, or keep "
                "what they are computed from in a variable that is no metric's."
            )
        elif (own := _own_sum(use)) is not None:
            _refuse_others(refused, each, use, own)
        elif use.op._id <= seen_operations.last(graph):
            refused[use.op] = (
                f"A session had run '{use.op.name}', which reads the metric variable "
                f"'{each.name}', before that was updated: its value would be of this rank's "
                "records alone. Build the whole graph before the first run."
            )
        else:
            reducible.append(use)
    return reducible


def _own_sum(use: _Use) -> tf.Operation | None:
    """Returns the collective by which a script itself adds up over ranks what it computes.

    That is of metrics alone: where data come in, the sum is one of something else.
    """
    sums = [
        op
        for op in _computed_by([use.op])
        if collectives.is_scripts_own(op) and not _averages(op) and not _is_of_data(op)
    ]
    return min(sums, key=lambda op: op._id, default=None)


def _is_of_data(collective: tf.Operation) -> bool:
    upstream = graph_analysis.walk([collective], control=False)
    return any(takes_data(op) and not op.name.startswith("collective/") for op in upstream)


def _refuse_others(
    refused: dict[Any, str], each: MetricState, use: _Use, own: tf.Operation
) -> None:
    """Refuses a look at what a script's own collective `own` takes of a rank's state."""

    def words(name: str) -> str:
        return (
            f"'{name}', computed of the metric variable '{each.name}', is of this rank's records "
            f"alone, since the script adds it up over ranks by '{own.name}'. Use what that gives."
        )

    before = graph_analysis.walk([own], control=False)
    for op in _computed_by([use.op]):
        if metric_states.is_of_all_ranks(op):
            continue
        if op in before:
            refused.update((x.name, words(x.name)) for x in op.outputs)
        else:
            refused[op] = words(op.name)


def _averages(collective: tf.Operation) -> bool:
    """Tells whether a script's collective gives back what is the same on all ranks."""
    kind = graph_analysis.collective_kind(collective.type)
    if kind == "Broadcast":
        return True
    is_horovods = collective.type.startswith("Horovod")
    reduction = "reduce_op" if is_horovods else collectives.REDUCTION
    # Horovod's Average, Min and Max.
    return kind == "Allreduce" and collective.get_attr(reduction) in (0, 3, 4)


def _too_early(graph: tf.Graph) -> set[tf.Operation]:
    """Returns what ranks need before they can reduce anything, and what fills queues."""
    before = [check.bounds.op for check in gate.gates_of(graph).checks]
    enqueuing = [op for op in graph.get_operations() if "Enqueue" in op.type]
    return graph_analysis.upstream([*before, *enqueuing])


def _warn_of_saves(known: MetricReads, each: MetricState) -> None:
    """Warns of a state of which a checkpoint has that of one rank."""
    saved = f"saves of {each.name}"
    if saved not in known.warned and any(
        metric_states.is_saved(op) for read in each.reads for op in read.consumers()
    ):
        known.warned.add(saved)
        if collectives.rank() == 0:
            tf.logging.warning(
                "The metric variable '%s' is saved in a checkpoint as it is on rank 0, without the "
                "records of the other ranks. Leave it out of the Saver.",
                each.name,
            )


def _warn_of_reads_inside(known: MetricReads, each: MetricState, uses: Sequence[_Use]) -> None:
    inside = any(use.read.op._get_control_flow_context() is not None for use in uses)
    if (inside or each.read_inside) and each.name not in known.warned:
        known.warned.add(each.name)
        tf.logging.warning(
            "The metric '%s' is read in a branch, a loop or a function: a value "
            "computed from it there covers only this rank's records. Read it outside: it then "
            "covers those of all ranks.",
            each.name,
        )


# What is refused


def _refuse(refused: dict[Any, str], each: MetricState, uses: Iterable[_Use]) -> None:
    """Refuses operations that compute something from a state that can't be combined.

    Updates are allowed; what they compute from the state must not be read.
    """
    updates = _updates(each)
    seen: set[tf.Operation] = set()
    # What an assignment of a value of the script's own gives back is its own, too.
    looked_at = {x.name for x in each.reads if not _is_given_back(x, each)}
    for read in each.reads:
        if read.name in looked_at:
            refused[read.name] = _words(read.name, each)
    stack = [use.op for use in uses if use.read.name in looked_at]
    while stack:
        op = stack.pop()
        if op in seen or metric_states.is_aside(op) or _is_ours(op):
            continue
        seen.add(op)
        if op not in updates:
            _refuse_use(refused, op, each)
            continue
        for x in op.outputs:
            refused[x.name] = _words(x.name, each)
            stack += x.consumers()


def _is_given_back(read: tf.Tensor, each: MetricState) -> bool:
    """Tells whether `read` is what an assignment of a value that all ranks give returns."""
    after = [*read.op.control_inputs, read.op]
    return any(op in each.set_alike for op in after)


def _updates(each: MetricState) -> set[tf.Operation]:
    """Returns the operations that metrics' updates are computed by, and these themselves."""
    graph = each.variable.graph
    memories = {graph_analysis.memory(v) for v in metric_states.metric_variables(graph)}
    writes = [
        op
        for op in graph.get_operations()
        if op.inputs
        and graph_analysis.WRITES.match(op.type)
        and graph_analysis.holder(op.inputs[0]) in memories
    ]
    calls = [
        op
        for op in graph.get_operations()
        if op.type in graph_analysis.CALLS
        and any(graph_analysis.holder(x) in memories for x in op.inputs if x.dtype == tf.resource)
    ]
    return graph_analysis.walk([*writes, *calls], control=False)


def _refuse_use(
    refused: dict[Any, str], op: tf.Operation, each: MetricState, obstacle: str = ""
) -> None:
    refused[op] = _words(op.name, each, obstacle)


def _words(reader: str, each: MetricState, obstacle: str = "") -> str:
    return (
        f"'{reader}' reads the metric variable '{each.name}', which {obstacle or each.obstacle}: "
        f"the ranks' values cannot become one. {metric_states.NEEDS}"
    )


# How states are reduced


@contextlib.contextmanager
def _adding_to(graph: tf.Graph) -> Iterator[None]:
    """Lets `graph` take operations that depend on nothing but what they are given."""
    with (
        graphs.open_for_changes(graph),
        graph.as_default(),
        tf.init_scope(),
        device_scopes.anywhere(),
        tf.name_scope(f"{SCOPE}/"),
        tf.control_dependencies(None),
    ):
        yield


def _computed_by(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns `operations` and what is computed of them, up to collectives and texts."""
    reached = set(operations)
    stack = list(reached)
    while stack:
        last = stack.pop()
        for x in last.outputs if not metric_states.is_of_all_ranks(last) else ():
            for op in x.consumers() if x.dtype != tf.string else ():
                if op not in reached:
                    reached.add(op)
                    stack.append(op)
    return reached


def _reduced(read: tf.Tensor, known: MetricReads) -> tf.Tensor:
    """Returns what all ranks have of a state in the place of `read`, what this rank has of it."""
    graph = read.graph
    reduced = reads_of(graph).wholes
    if read.name not in reduced:
        each = known.by_name[read.name]
        assert each.reduction is not None
        value = tf.identity(read) if read.dtype._is_ref_dtype else read
        # A read that waits for data can't be one of a rank without any, which has a state, though.
        waits = len(graph_analysis.upstream([read.op])) > 2
        state = tf.convert_to_tensor(each.variable) if waits else None
        whole = of_all_ranks(f"{each.name}/state", value, each.reduction, state)
        whole.set_shape(read.shape)
        reduced[read.name] = whole
        metrics.note_update(whole, read.op)
    return reduced[read.name]


def _start_on_rank_0(graph: tf.Graph, refused: dict[Any, str], each: MetricState) -> None:
    """Lets rank 0 alone have what a sum is set to on all ranks."""
    for op in each.set_alike:
        value = op.inputs[1]
        if _is_ours(value.op):
            continue
        if op._id <= seen_operations.last(graph):
            refused[op] = (
                f"A session had run '{op.name}', which sets the metric variable '{each.name}', "
                "before anything was added to that: all ranks' sum would have the value of each. "
                "Build the whole graph before the first run."
            )
        else:
            is_first = collectives.rank() == 0
            op._update_input(1, tf.identity(value) if is_first else tf.zeros_like(value))
