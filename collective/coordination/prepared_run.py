"""Keeps a rank's state of the runs and sessions that all ranks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import dealt_input, run_analysis
from collective.coordination.agreement import (
    ENDED,
    EVALUATING,
    FAILED,
    IDLE,
    LEFT,
    RUNNING,
    Header,
    needs_all_ranks,
)
from collective.coordination.run_extension import NO_PART, SessionPart
from collective.errors import RankError
from collective.job.progress_board import Label
from collective.ops.communication.gate import Check, Gate, gates_of
from collective.ops.graph import graph_state


@dataclasses.dataclass(frozen=True)
class CountedRun:
    """Says what to count in a run.

    Attributes:
        iterators: the names of the iterators whose batches it takes and counts.
        started: the names of the iterators that it restarts.
        count: counts the batches after everything that the run fetches is computed.
        count_alone: counts them without the run.
    """

    iterators: frozenset[str]
    started: frozenset[str]
    count: tuple[tf.Operation, ...] = ()
    count_alone: tuple[tf.Operation, ...] = ()


@dataclasses.dataclass
class PreparedRun:
    """Holds one way of running a graph, prepared once and used at every step.

    Attributes:
        footprint: what it executes.
        keep_alive: the fetches and feeds themselves: a run is identified by their identities, which
            must not be reused by other objects.
        targets: run with the fetches: an agreement for each level, of which the first gives
            all ranks' headers; then exchanges of rows that gradients wait for, and the collectives
            that a rank out of data takes part in.
        idle_run: how a rank without data takes part in it; None if it can't.
        idle_targets: run with `idle_run`: an agreement for each level but the first.
        repeatable: whether it can be tried again if ranks weren't ready: it has taken no data.
        tickets: the gates' placeholders.
        gate: the first gate that it passes, if any.
        disagreement: the headers that kept a gate closed, set while it runs.
        disagreed_later: whether that wasn't the first gate, so that collectives had been executed.
        feeds: what its footprint feeds with nothing, by the tensors' names.
        description: says what it does, for peers, the launcher and errors; '' before it is run.
        label: its description for the launcher.
        is_step: whether the launcher counts it as a step of training.
        extended: whether the extension of its graph takes part in it.
        kept: operations that use the tensors that the footprint feeds with nothing. TensorFlow's
            optimizer would drop an operation that is only a control input, and make its consumer
            wait for all of its inputs instead, including the sources of the fed tensors.
        counted: what to count in it (`collective.coordination.batch_counter`); None: nothing.
        unweighed: the names of what counts alike on all ranks in the loss of a step.
        recorder: keeps its first batches, to be compared with the other ranks'
            (`collective.monitoring.input_check`).
    """

    footprint: run_analysis.RunFootprint
    keep_alive: Any
    targets: list[Any] = dataclasses.field(default_factory=list)
    idle_run: run_analysis.IdleRun | None = None
    idle_targets: list[tf.Tensor] = dataclasses.field(default_factory=list)
    repeatable: bool = True
    tickets: list[tf.Tensor] = dataclasses.field(default_factory=list)
    gate: Gate | None = None
    disagreement: list[Header] | None = None
    disagreed_later: bool = False
    feeds: dict[str, Any] = dataclasses.field(default_factory=dict)
    description: str = ""
    label: Label | None = None
    is_step: bool = False
    extended: bool = False
    unweighed: Sequence[str] = ()
    kept: list[tf.Operation] = dataclasses.field(default_factory=list)
    counted: CountedRun | None = None
    recorder: Any = None

    def begins(self) -> None:
        """Forgets the outcome of the previous time."""
        self.disagreement = None

    def refused(self, headers: list[Header], first: bool) -> None:
        """Notes the headers that kept a gate closed: all ranks continue without this run.

        Args:
            headers: of all ranks.
            first: whether it was the first gate of the run.
        """
        self.disagreement, self.disagreed_later = headers, not first

    @property
    def extra_operations(self) -> list[tf.Operation]:
        """Returns the operations that it carries out with the fetches, also on one rank."""
        return [*(self.counted.count if self.counted else ()), *self.kept]

    @property
    def needs_peers(self) -> bool:
        """Tells whether all ranks must carry it out together."""
        return bool(self.targets or self.footprint.initialized or self.extended)

    @property
    def wishes(self) -> list[int]:
        """Returns each rank's wish to stop, from the headers that kept a gate closed."""
        return [header.wish for header in self.disagreement or ()]

    def first_gate_opened(self, started: bool) -> bool:
        """Tells whether the first gate had opened in a run that failed.

        Args:
            started: whether the run reached the agreement.
        """
        return started and (self.disagreement is None or self.disagreed_later)

    def end_of_data(self, error: tf.errors.OutOfRangeError, description: str) -> BaseException:
        """Returns the error to raise instead of `error`, an end of data: `error` itself in most
        cases.

        A run that updates nothing and has only fed data can't be out of data: it needs all ranks.
        """
        if self.footprint.trains or not self.repeatable or self.extended:
            return error
        return needs_all_ranks(description, error)


@dataclasses.dataclass
class EndOfData:
    """Records how training on a graph ends.

    Attributes:
        needs_all: why it must not end before all ranks are out of data; '' if it may.
    """

    needs_all: str = ""


class Membership:
    """Holds this rank's part in a session that all ranks share.

    Attributes:
        number: counts the sessions that ranks share; the same on every rank.
        checks: the checks of the session's graph.
        needs_all_data: why training must not end before all ranks are out of data; '' if it may.
        evaluation: the signature of the last run if that was an evaluation.
        last_evaluation: that run; this rank answers runs like it after its own data have ended.
            None if it can't.
        over: why nothing more can be run in the session, after a peer or this rank has left.
        count: how many runs reached the agreement; None before the first.
        part: what the extension of the session's graph does in the session.
    """

    def __init__(self, number: int, checks: list[Check], needs_all_data: str = ""):
        self.number = number
        self.checks = checks
        self.needs_all_data = needs_all_data
        self.count: int | None = None
        self.evaluation: int | None = None
        self.last_evaluation: RunAttempt | None = None
        self.over: BaseException | None = None
        self.part: SessionPart = NO_PART

    @staticmethod
    def of(number: int, graph: tf.Graph) -> Membership:
        """Returns the part in a session of `graph`."""
        ends = graph_state.of(graph, EndOfData)
        return Membership(number, gates_of(graph).checks, ends.needs_all)

    def note(self, headers: list[Header], verdict: BaseException | None) -> None:
        """Applies the ranks' headers, and the verdict on them, to the session."""
        if any(h.status in (LEFT, FAILED) for h in headers) or isinstance(verdict, RankError):
            closed = tf.errors.OutOfRangeError(None, None, "this session is closed")
            self.over = verdict or closed
        if verdict is not None and not isinstance(verdict, tf.errors.OutOfRangeError):
            # All ranks raise it, and none answers an evaluation any more. Ranks that had reached an
            # evaluation and ranks that hadn't must agree on their next run.
            self.evaluation = None


@dataclasses.dataclass
class RunAttempt:
    """Holds the state shared by the steps of one run (`collective.coordination.coordinator`).

    Attributes:
        original: TensorFlow's `Session.run`.
        session: the session.
        member: this rank's part in it.
        run: the run.
        description: says what the run does, for peers, the launcher and errors.
        feeds: what it is fed with.
    """

    original: Any
    session: Any
    member: Membership
    run: PreparedRun
    description: str
    feeds: dict[Any, Any]

    @property
    def signature(self) -> int:
        """Returns the signature of the run, by which ranks compare their runs."""
        return self.run.footprint.signature

    @property
    def shared(self) -> tuple[str, ...]:
        """Returns the names of everything that all ranks must run."""
        return self.run.footprint.shared

    @property
    def running(self) -> Header:
        """Returns the header of a rank that is about to carry it out."""
        return Header(RUNNING, self.member.number, self.signature)

    @property
    def dealt(self) -> int:
        """Returns 63 bits of what was dealt to this rank of data that have ended."""
        return dealt_input.end_digest(self.session)

    @property
    def ended(self) -> Header:
        """Returns the header of a rank that is out of data."""
        evaluating = 0 if self.run.footprint.trains else EVALUATING
        return Header(ENDED, self.member.number, self.signature, evaluating, self.dealt)


def peers_are_idle(headers: list[Header], signature: int) -> bool:
    """Tells whether a rank that runs `signature` just has to try again.

    All is well except for peers that still answer an earlier evaluation: they come to the run, too.
    """
    return (
        any(h.status == IDLE for h in headers)
        and all(h.status in (RUNNING, IDLE) for h in headers)
        and len({h.session for h in headers}) == 1
        and {h.signature for h in headers if h.status == RUNNING} == {signature}
        and all(h.signature != signature for h in headers if h.status == IDLE)
    )
