"""Keeps the library's state of sessions, one record for each."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Callable, Protocol

import tensorflow.compat.v1 as tf

from collective.coordination.prepared_run import PreparedRun
from collective.coordination.run_extension import NO_PART, SessionPart
from collective.errors import Preempted

_VARIABLES = tf.GraphKeys.GLOBAL_VARIABLES


class BackgroundWork(Protocol):
    """Is work on a session's state that goes on during its runs (writing a checkpoint's files)."""

    def settle(self) -> None:
        """Waits for it with all ranks, and raises its error on all alike. Every rank calls it."""

    def wait_alone(self) -> None:
        """Waits for this rank's part of it if the ranks can't meet any more; raises nothing."""


@dataclasses.dataclass
class SessionState:
    """Holds all state of one session.

    Attributes:
        unequal_variables: by their names, the variables that were initialized before the graph had
            anything that ranks share: rank 0's values of them are still to be broadcast.
        prepared_runs: the runs of the session, by their fetches and feeds.
        training_runs: how many training runs the consistency check has counted.
        dealt_runs: how many training runs the check of dealt input has counted.
        eviction_step: the global step at which rows were evicted last, or might have been; None if
            it isn't known.
        runs_to_eviction: the minimum number of training runs before rows are evicted.
        steps_of_run: the largest number of global steps that a run counts; None if unknown.
        eviction_graph_version: the graph's version for `steps_of_run`.
        handled_error: the identity of the error that was being handled when the session was made.
        is_stopping: whether it was told that all ranks are preempted, or is ending: it may continue
            to run.
        has_left: whether this rank has closed it or is about to; it runs nothing more.
        is_closed: whether this rank has closed it.
        is_librarys: whether the library has made it, and not the script.
        number: which of the sessions that all ranks share it is; None before they do.
        part: what the extension of the session's graph does in the session, on one rank.
        begun_iterators: the names of the iterators of which batches were taken that are counted
            (`collective.coordination.batch_counter`).
        void_iterators: those of them of which a restored checkpoint knows nothing.
        at_close: functions to call after the session is closed, by name.
        background_save: what writes a checkpoint of the session during its runs, if anything does.
        save_failed: whether a hook's last save failed in a way that lets training continue.
        saver_hooks: the `CheckpointSaverHook`s that have saved it, by their folders.
        last_increments: what saves an increment where the session's last whole checkpoint can't be
            written, by folders: f(session, step) -> the prefix, or ''.
        chains: the checkpoints that increments follow, by their folders
            (`collective.checkpoint.saving.running_chain`).
        is_monitored: whether a `MonitoredSession` has made it, which ends with the data.
        tried: with --test-mode, the values of runs, by kinds of run and names of fetches.
        kinds: with --test-mode, the kinds of runs, by names of fetches.
        answers: how many runs --test-mode has answered with earlier values.
        followers: the followers of tables' changes, by the consumers' names
            (`collective.checkpoint.saving.consumers`).
    """

    unequal_variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepared_runs: dict[tuple[Any, ...], PreparedRun] = dataclasses.field(default_factory=dict)
    training_runs: int = 0
    dealt_runs: int = 0
    eviction_step: int | None = None
    runs_to_eviction: int = 0
    steps_of_run: int | None = None
    eviction_graph_version: int | None = None
    handled_error: int | None = None
    is_stopping: bool = False
    has_left: bool = False
    is_closed: bool = False
    is_librarys: bool = False
    number: int | None = None
    part: SessionPart = NO_PART
    begun_iterators: set[str] = dataclasses.field(default_factory=set)
    void_iterators: set[str] = dataclasses.field(default_factory=set)
    at_close: dict[str, Callable[[], None]] = dataclasses.field(default_factory=dict)
    background_save: BackgroundWork | None = None
    save_failed: bool = False
    saver_hooks: dict[str, Any] = dataclasses.field(default_factory=dict)
    last_increments: dict[str, Callable[[Any, int], str]] = dataclasses.field(default_factory=dict)
    chains: dict[str, Any] = dataclasses.field(default_factory=dict)
    followers: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_monitored: bool = False
    tried: dict[str, dict[tuple[str, ...], Any]] = dataclasses.field(default_factory=dict)
    kinds: dict[tuple[str, ...], str] = dataclasses.field(default_factory=dict)
    answers: int = 0

    def restored(self) -> None:
        """Notes that a checkpoint was restored: the global step may have changed."""
        self.eviction_step, self.runs_to_eviction = None, 0
        self.void_iterators |= self.begun_iterators

    def refuse_if_left(self) -> None:
        """Refuses a session that this rank has left; it would otherwise count as a session without
        peers.

        Raises:
            RuntimeError: TensorFlow's own error.
        """
        if self.has_left:
            raise RuntimeError("Attempted to use a closed Session.")

    def close(self) -> None:
        """Calls the functions registered for the session's close."""
        self.is_closed = True
        while self.at_close:
            self.at_close.popitem()[1]()


def state_of_session(session: Any) -> SessionState:
    """Returns the record of `session`, made when it is first asked for."""
    state: SessionState | None = getattr(session, "_collective_state", None)
    if state is None:
        state = session._collective_state = SessionState()
    return state


# The script's session with variables in which this process last ran something.
_last_run: list[weakref.ref[Any]] = []


def note_run(session: Any) -> None:
    """Notes that this process runs something in a session.

    One without variables, in which ranks exchange messages, for instance, isn't noted.
    """
    if _last_run and _last_run[0]() is session:
        return
    if session.graph.get_collection(_VARIABLES) and not state_of_session(session).is_librarys:
        _last_run[:] = [weakref.ref(session)]


def last_open_session() -> Any:
    """Returns the script's session with variables in which this process last ran something; None
    if it is closed.
    """
    session: Any = _last_run[0]() if _last_run else None
    return None if session is None or state_of_session(session).is_closed else session


def is_end(error: BaseException) -> bool:
    """Tells whether an error that leaves a session is an ordinary end."""
    if isinstance(error, SystemExit):
        # All ranks are preempted after the same step.
        return isinstance(error, Preempted) or error.code in (None, 0)
    return isinstance(error, (tf.errors.OutOfRangeError, StopIteration, GeneratorExit))
