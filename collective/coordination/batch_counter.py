"""Lets a layer above count the batches that runs take from iterators, as a part of the runs.

The coordination of runs knows a counter only by these classes (`collective.data.positions` is one).
The runs of a graph without a counter are unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Set
from typing import Any, Protocol

import tensorflow.compat.v1 as tf

from collective.coordination.prepared_run import CountedRun, PreparedRun
from collective.coordination.run_extension import extension_of
from collective.coordination.session_state import state_of_session
from collective.errors import RankError
from collective.ops.graph import graph_analysis, graph_state, graphs
from collective.ops.graph.sessions import run_unpatched

# The operations by which a session gives an iterator its dataset.
STARTS = frozenset({"MakeIterator", "DeserializeIterator"})


class BatchCounter(Protocol):
    """Counts the batches of some of a graph's iterators."""

    def counted_run(
        self, operations: Set[tf.Operation], after: list[tf.Operation]
    ) -> CountedRun | None:
        """Returns what to count in a run; None: nothing.

        Args:
            operations: the operations that the run executes, or that were executed ahead for it.
            after: those of its fetches.

        Raises:
            NotImplementedError: the batches that the run takes can't be counted.
        """


@dataclasses.dataclass
class CountedBatches:
    """Records what counts the batches that the runs of a graph take; None: nothing."""

    counter: BatchCounter | None = None


def counter_of(graph: tf.Graph) -> BatchCounter | None:
    """Returns the counter of `graph`, if it has one."""
    return graph_state.of(graph, CountedBatches).counter


def count(graph: tf.Graph, counter: BatchCounter) -> None:
    """Has `counter` count the batches that the runs of `graph` take."""
    graph_state.of(graph, CountedBatches).counter = counter


def counted_run(
    graph: tf.Graph, operations: Set[tf.Operation], leaves: Iterable[Any], fed: Iterable[Any]
) -> CountedRun | None:
    """Returns what to count of the batches that a run takes; None: nothing.

    Args:
        graph: the graph.
        operations: those that the run executes.
        leaves: its fetches.
        fed: the fed tensors, or their names.

    Raises:
        NotImplementedError: see `BatchCounter.counted_run`.
    """
    counter = counter_of(graph)
    if counter is None:
        return None
    fed_names = {name for leaf in fed for name in graph_analysis.tensor_names(leaf)}
    executed = operations | extension_of(graph).executed_ahead(operations, fed_names)
    fetched = [graph.as_graph_element(leaf) for leaf in leaves]
    after = [
        each if isinstance(each, tf.Operation) else each.op
        for each in fetched
        if isinstance(each, tf.Operation) or each.name not in fed_names
    ]
    with graphs.open_for_changes(graph), graph.as_default(), tf.init_scope():
        return counter.counted_run(executed, after)


@contextlib.contextmanager
def followed(session: Any, run: PreparedRun) -> Iterator[None]:
    """Tracks a run of `session`: which iterators have begun, and what is lost if the run fails.

    A batch whose step failed counts as used, because its iterator has passed it.

    Args:
        session: the session.
        run: the run.

    Raises:
        RuntimeError: a checkpoint was restored after batches of an iterator had been taken.
    """
    counted = run.counted
    if counted is None:
        yield
        return
    state = state_of_session(session)
    void = counted.iterators & state.void_iterators
    if void:
        raise RuntimeError(
            f"a checkpoint was restored after batches of '{min(void)}' had been taken: the "
            "iterator isn't where the checkpoint's data are. Restore before the first batch is "
            "taken, or run the initializer of an initializable iterator after saver.restore()."
        )
    run.disagreement = None
    try:
        yield
    except tf.errors.OutOfRangeError:
        raise
    except (tf.errors.OpError, RankError):
        # With several ranks, they had all come to the agreement, each with its batch.
        if run.gate is None or run.disagreement is not None:
            with contextlib.suppress(tf.errors.OpError, RuntimeError):
                run_unpatched(session, list(counted.count_alone))
        raise
    state.void_iterators -= counted.started
    state.begun_iterators -= counted.started
    state.begun_iterators |= counted.iterators
