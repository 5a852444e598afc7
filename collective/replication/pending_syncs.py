"""Keeps track of rank-local values that are written to replicated variables, until they become
means.

Such a value is noted where it is written. `sync_pending` then replaces it by the mean over ranks,
with as few allreduces as the values' dependences allow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.communication import dense_allreduce
from collective.ops.communication.gate import gates_of
from collective.ops.graph import (
    device_scopes,
    graph_analysis,
    graph_state,
    graphs,
    seen_operations,
)
from collective.replication.analysis import ReplicationAnalysis, takes_data


class PendingValue(NamedTuple):
    """Stands for a rank-local value on its way to a replicated variable.

    Attributes:
        op: the operation that takes it.
        place: which of the operation's inputs it is.
        name: the variable's name.
    """

    op: tf.Operation
    place: int
    name: str

    @property
    def value(self) -> tf.Tensor:
        return self.op.inputs[self.place]


@dataclasses.dataclass
class PendingSyncs:
    """Records what is written to the replicated variables of one graph.

    Attributes:
        values: the values that must still become means.
        synced: the operations that use a mean, or will.
        drifting: the memory of variables that a script was warned of: their replicas drift apart.
        averaged: the memory of variables that hold averages over all ranks.
        scanned_version: the graph's version when assignments were last looked for.
        scanned_operations: how many operations it had when assignments before a branch were last
            looked for.
        changed_locally: the memory of the variables that these change by rank-local values.
    """

    values: list[PendingValue] = dataclasses.field(default_factory=list)
    synced: set[tf.Operation] = dataclasses.field(default_factory=set)
    drifting: set[tf.Operation] = dataclasses.field(default_factory=set)
    averaged: set[tf.Operation] = dataclasses.field(default_factory=set)
    scanned_version: int = 0
    scanned_operations: int = 0
    changed_locally: set[tf.Operation] = dataclasses.field(default_factory=set)

    def note(self, op: tf.Operation, place: int, name: str) -> None:
        """Notes that input `place` of `op`, on its way to the variable `name`, is to be a mean."""
        self.values.append(PendingValue(op, place, name))
        self.synced.add(op)


def pending_syncs_of(graph: tf.Graph) -> PendingSyncs:
    """Returns the record of `graph`; of the graph around it if it is a function's."""
    return graph_state.of(graphs.outermost(graph), PendingSyncs)


def analysis_of(
    graph: tf.Graph, same: frozenset[tf.Operation] = frozenset()
) -> ReplicationAnalysis:
    """Returns a replication analysis of `graph` as it is now.

    Args:
        graph: the graph.
        same: further operations whose results are the same on all ranks.
    """
    pending = pending_syncs_of(graph)
    return ReplicationAnalysis(
        graphs.outermost(graph), pending.synced | same, pending.drifting, pending.averaged
    )


def sync_pending(graph: tf.Graph) -> None:
    """Replaces all noted values by means over ranks.

    Values from the same data share an allreduce; values that depend on these need another one.

    Raises:
        NotImplementedError: a session has run the operations already, which then can't wait for
            anything else.
    """
    pending = pending_syncs_of(graph)
    if not pending.values:
        return
    analysis = analysis_of(graph)
    values = [each for each in pending.values if analysis.is_rank_local([each.value])]
    values.sort(key=lambda each: (each.name, each.op._id))
    pending.values = values
    if any(each.op._id <= seen_operations.last(graph) for each in values):
        raise NotImplementedError(
            f"A session had run the moving average '{values[0].name}' before the optimizer was "
            "made: its values would stay this rank's own. Build the whole graph before the first "
            "run."
        )
    pending.values = []
    with (
        graphs.open_for_changes(graph),
        graph.as_default(),
        graphs.outside(),
        device_scopes.anywhere(),
        tf.name_scope("collective/written/"),
    ):
        while values:
            values = _sync_independent(values)
            gates_of(graph).changed()


def _sync_independent(values: Sequence[PendingValue]) -> list[PendingValue]:
    """Syncs the values that depend on no other one of `values`, and returns the others."""
    upstream = {each: graph_analysis.upstream([each.value.op]) for each in values}
    ready: list[PendingValue] = []
    waiting: list[PendingValue] = []
    for each in values:
        depends = any(other.op in upstream[each] for other in values)
        (waiting if depends else ready).append(each)
    for together in _by_data(ready, upstream):
        means = dense_allreduce.over_ranks(
            "written", [(each.name, each.value) for each in together]
        )
        for each, mean in zip(together, means):
            each.op._update_input(each.place, mean)
    return waiting


def _by_data(
    values: Iterable[PendingValue], upstream: dict[PendingValue, set[tf.Operation]]
) -> Iterable[Sequence[PendingValue]]:
    """Groups values that come from the same iterators and feeds, and after the same updates.

    So a run that needs some of them takes no other data for it, and changes nothing else.
    """
    by_sources: dict[tuple[str, ...], list[PendingValue]] = {}
    for each in values:
        sources = sorted(
            str(op.name)
            for op in upstream[each]
            if takes_data(op) or graph_analysis.WRITES.match(op.type)
        )
        by_sources.setdefault(tuple(sources), []).append(each)
    return [together for _, together in sorted(by_sources.items())]
