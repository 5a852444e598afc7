"""Gathers what every run of a session needs, so that it is looked up once."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import run_analysis
from collective.coordination.batch_counter import CountedBatches
from collective.coordination.reduced_reads import ReducedReads, reads_of
from collective.coordination.run_extension import GraphExtension
from collective.coordination.session_state import SessionState, state_of_session
from collective.ops.communication import collectives
from collective.ops.communication.gate import GraphGates, gates_of
from collective.ops.graph import graph_state
from collective.ops.graph.training_flag import TrainingFlag
from collective.strategies.grouped_exchange import Group, groups_of


@dataclasses.dataclass(frozen=True)
class RunContext:
    """Holds what all runs of one session have in common.

    It holds records themselves, not what they had when it was made: it never gets old.

    Attributes:
        graph: the session's graph.
        state: the library's state of the session.
        gates: the graph's gates and checks.
        groups: its groups of lookups.
        flag: its training flag.
        reads: its reads that return the values of all ranks.
        counted: what counts the batches that its runs take.
        extended: its extension.
        ranks: N, the number of ranks.
    """

    graph: tf.Graph
    state: SessionState
    gates: GraphGates
    groups: list[Group]
    flag: TrainingFlag
    reads: ReducedReads
    counted: CountedBatches
    extended: GraphExtension
    ranks: int

    @property
    def is_plain(self) -> bool:
        """Tells whether the library changes nothing in the graph's runs.

        That is the case on one rank, if the graph has no dynamic table and no group of lookups.
        """
        return self.ranks == 1 and self.flag.tensor is None and not self.groups

    @property
    def is_shared(self) -> bool:
        """Tells whether ranks train the graph together."""
        return bool(self.gates.gates) or run_analysis.is_shared(self.graph)


def context_of(session: Any) -> RunContext:
    """Returns the context of the runs of `session`, made at its first run."""
    context: RunContext | None = getattr(session, "_collective_context", None)
    if context is None:
        graph = session.graph
        context = session._collective_context = RunContext(
            graph,
            state_of_session(session),
            gates_of(graph),
            groups_of(graph),
            graph_state.of(graph, TrainingFlag),
            reads_of(graph),
            graph_state.of(graph, CountedBatches),
            graph_state.of(graph, GraphExtension),
            collectives.size(),
        )
    return context
