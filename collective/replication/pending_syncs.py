"""What is written to replicated variables by what each rank alone knows, until it has become the
mean over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import dense_allreduce, graph_analysis, graphs
from collective.ops.gate import gates_of
from collective.ops.graph_state import state_of
from collective.replication.analysis import Search, takes_data


class OwnValue(NamedTuple):
    """A value of this rank's: input `place` of `op`, on its way to the variable `name`."""

    op: tf.Operation
    place: int
    name: str


class PendingSyncs:
    """What is written to the replicated variables of one graph.

    Attributes:
        own: what is still to become a mean.
        known: the operations of which a value is, or will be, one.
        drifting: the memory of variables that have none, and were warned of.
        averaged: the memory of variables that moving averages of all ranks are in.
        version: the graph's when its operations were last looked at.
        looked: how many operations it had when changes before branches were last looked for.
        changed: the memory of variables that these change by what one rank alone knows.
    """

    def __init__(self) -> None:
        self.own: list[OwnValue] = []
        self.known: set[tf.Operation] = set()
        self.drifting: set[tf.Operation] = set()
        self.averaged: set[tf.Operation] = set()
        self.version = self.looked = 0
        self.changed: set[tf.Operation] = set()

    def note(self, op: tf.Operation, place: int, name: str) -> None:
        self.own.append(OwnValue(op, place, name))
        self.known.add(op)


def written_in(graph: tf.Graph) -> PendingSyncs:
    """That of `graph`; of the graph around it if it is a function's."""
    state = state_of(graphs.outermost(graph))
    if state.pending_syncs is None:
        state.pending_syncs = PendingSyncs()
    pending: PendingSyncs = state.pending_syncs
    return pending


def search_of(graph: tf.Graph) -> Search:
    """A search for what is this rank's own in `graph`, as of now."""
    found = written_in(graph)
    return Search(graphs.outermost(graph), found.known, found.drifting, found.averaged)


def exchange(graph: tf.Graph) -> None:
    """Exchanges all that was noted: by one allreduce for what comes from the same data, one more
    for what depends on that.

    Raises:
        NotImplementedError: a session has run the operations already, which then can't wait for
            anything else.
    """
    found = written_in(graph)
    if not found.own:
        return
    search = search_of(graph)
    left = sorted(
        (own for own in found.own if search.is_own([own.op.inputs[own.place]])),
        key=lambda own: (own.name, own.op._id),
    )
    found.own = left
    if any(own.op._id <= state_of(graph).seen_by_session for own in left):
        raise NotImplementedError(
            f"A session had run the moving average '{left[0].name}' before "
            f"the optimizer was made: its "
            "values would stay this rank's own. Build the whole graph "
            "before the first run."
        )
    found.own = []
    with (
        graphs.open_for_changes(graph),
        graph.as_default(),
        tf.init_scope(),
        tf.device(None),
        tf.name_scope("collective/written/"),
    ):
        while left:
            behind = {own: graph_analysis.upstream([own.op.inputs[own.place].op]) for own in left}
            ready = [own for own in left if not any(other.op in behind[own] for other in left)]
            left = [own for own in left if own not in ready]
            for some in _by_data(ready, behind):
                values = dense_allreduce.over_ranks(
                    "written", [(own.name, own.op.inputs[own.place]) for own in some]
                )
                for own, mean in zip(some, values):
                    own.op._update_input(own.place, mean)
            gates_of(graph).changed()


def _by_data(
    ready: Iterable[OwnValue], behind: dict[OwnValue, set[tf.Operation]]
) -> Iterable[Sequence[OwnValue]]:
    """Those together that come from the same iterators and feeds and behind the same updates: a run
    that needs some of them takes no other data for it, and changes nothing else.
    """
    out: dict[tuple[str, ...], list[OwnValue]] = {}
    for own in ready:
        out.setdefault(
            tuple(
                sorted(
                    str(op.name)
                    for op in behind[own]
                    if takes_data(op) or graph_analysis.WRITES.match(op.type)
                )
            ),
            [],
        ).append(own)
    return [some for _, some in sorted(out.items())]
