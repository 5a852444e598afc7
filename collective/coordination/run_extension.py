"""Lets a layer above take part in the runs of a graph's sessions, in addition to the script.

The coordination of runs knows extensions only by these two classes. The base classes do nothing: a
graph without an extension has `NO_EXTENSION`, and its sessions have `NO_PART`.
(`collective.prefetch` exchanges keys a batch ahead that way.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set
from typing import Any, Callable, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_state


class RewrittenFetches(NamedTuple):
    """Holds the fetches to run instead of the script's.

    Attributes:
        fetches: a flat list.
        restore: turns their values into the structure that the script expects.
    """

    fetches: list[Any]
    restore: Callable[[list[Any]], Any]


class SessionPart:
    """Takes part in the runs of one session; this one does nothing."""

    def feeds(
        self, trains: bool, gated: bool, feeds: dict[Any, Any], description: str
    ) -> dict[str, Any]:
        """Returns additional feeds of a run, just before it starts.

        Args:
            trains: whether the run updates something.
            gated: whether the ranks agree on the run.
            feeds: the script's own feeds.
            description: says what the run does, for errors.
        """
        return {}

    def run_stopped(self) -> None:
        """Notes that the run ended before the ranks had agreed on it."""

    def run_never_started(self, fed: dict[str, Any]) -> None:
        """Notes, on one rank, that TensorFlow has refused the run with the feeds `fed`."""

    def abandon(self) -> None:
        """Notes that this program is about to end."""

    def iterator_restarts(self) -> None:
        """Notes that an iterator of the session is about to start again."""

    def wait(self) -> None:
        """Waits until nothing of the extension runs in the session."""

    def leave(self) -> None:
        """Ends together with the peers, because this rank is about to leave the session."""


class RunExtension:
    """Takes part in the runs of one graph; this one does nothing."""

    def rewrite_fetches(self, fetches: Any) -> RewrittenFetches | None:
        """Returns the fetches to run in the place of `fetches`; None: run them as they are."""
        return None

    def reads_iterator_started_by(self, operations: Iterable[tf.Operation]) -> bool:
        """Tells whether any of `operations` restarts an iterator that the extension reads."""
        return False

    def takes_part_in(self, operations: Iterable[tf.Operation]) -> bool:
        """Tells whether the extension takes part in a run that executes `operations`."""
        return False

    def executed_ahead(
        self, operations: Set[tf.Operation], fed: Iterable[str]
    ) -> Set[tf.Operation]:
        """Returns what the extension has already executed on behalf of a run.

        Args:
            operations: those that the run executes.
            fed: the names of the script's feeds.
        """
        return frozenset()

    def when_agreed(self) -> tf.Operation:
        """Makes the operation of a run that is executed once all ranks have agreed on the run."""
        return tf.no_op()

    def join(self, session: Any, member: Any, coordinator: Any) -> SessionPart:
        """Starts the extension's part in a session.

        Args:
            session: the session.
            member: its `collective.coordination.prepared_run.Membership`.
            coordinator: the process's `collective.coordination.coordinator.Coordinator`.
        """
        return NO_PART

    def join_alone(self, session: Any) -> SessionPart:
        """Starts the extension's part in a session of the only rank."""
        return NO_PART


NO_PART = SessionPart()
NO_EXTENSION = RunExtension()


@dataclasses.dataclass
class GraphExtension:
    """Records what takes part in a graph's runs in addition to the script."""

    extension: RunExtension = NO_EXTENSION


def extension_of(graph: tf.Graph) -> RunExtension:
    """Returns the extension of `graph`."""
    return graph_state.of(graph, GraphExtension).extension


def extend(graph: tf.Graph, extension: RunExtension) -> None:
    """Lets `extension` take part in the runs of `graph`."""
    graph_state.of(graph, GraphExtension).extension = extension
