"""What a rank keeps of the runs and the sessions that all ranks share."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.coordination import run_analysis
from collective.coordination.agreement import IDLE, RUNNING, Header, takes_all
from collective.coordination.run_extension import NO_PART, SessionPart
from collective.launch.progress_board import Label
from collective.ops.gate import Check, Gate


@dataclasses.dataclass
class PreparedRun:
    """A way of running a graph, prepared once and used at every step.

    Attributes:
        reach: what it executes.
        keep: the fetches themselves, so that their identities, by which a run is found again, stay
            theirs.
        targets: what agrees beside the fetches, one per level, of which the first gives rank 0's
            clock; then the collectives that a rank out of data takes part in.
        answer: how a rank that is out of data takes part; None if it can't.
        answering: what then agrees, one per level but the first.
        repeatable: whether it can be tried again when ranks were found not to be ready: it has
            taken no data.
        tickets: the gates' placeholders.
        gate: the first of the gates that it passes, if any.
        disagreement: the headers for which a gate stayed closed, set while it runs.
        begun: whether that was another gate than the first, so that collectives had been executed.
        label: what the launcher is told of it.
        extended: whether the extension of its graph takes part in it.
    """

    footprint: run_analysis.RunFootprint
    keep: Any
    targets: list[Any] = dataclasses.field(default_factory=list)
    answer: run_analysis.Answer | None = None
    answering: list[tf.Tensor] = dataclasses.field(default_factory=list)
    repeatable: bool = True
    tickets: list[tf.Tensor] = dataclasses.field(default_factory=list)
    gate: Gate | None = None
    disagreement: list[Header] | None = None
    begun: bool = False
    label: Label | None = None
    extended: bool = False

    def opened(self, started: bool) -> bool:
        """Whether the first gate had opened in a run that failed, `started` being whether it came
        as far as the agreement.
        """
        return started and (self.disagreement is None or self.begun)

    def missed(self, error: tf.errors.OutOfRangeError, doing: str) -> BaseException:
        """`error`, an end of data; if the run has none but what it is fed, and updates nothing,
        `agreement.takes_all`.
        """
        return (
            error
            if self.footprint.trains or not self.repeatable or self.extended
            else takes_all(doing, error)
        )


class Membership:
    """This rank's part in a session that all ranks have.

    Attributes:
        number: counts the sessions that ranks share; the same on every rank.
        checks: those of the session's graph.
        evaluation: the signature of the last run if that was an evaluation.
        answers: that run, and what answers the peers' while this rank has no more to evaluate; None
            if it can't.
        over: why nothing can be run in it any more, once a peer or this rank has left.
        count: of the runs that came as far as the agreement; None before the first.
        part: what the extension of the session's graph does in the session.
    """

    def __init__(self, number: int, checks: list[Check]):
        self.number = number
        self.checks = checks
        self.count: int | None = None
        self.evaluation: int | None = None
        self.answers: tuple[PreparedRun, Callable[[], None]] | None = None
        self.over: BaseException | None = None
        self.part: SessionPart = NO_PART


def finds_idle(headers: list[Header], signature: int) -> bool:
    """Whether who runs `signature` finds all well but for peers that answer an earlier evaluation:
    they come to it, too.
    """
    return (
        any(h.status == IDLE for h in headers)
        and all(h.status in (RUNNING, IDLE) for h in headers)
        and len({h.session for h in headers}) == 1
        and {h.signature for h in headers if h.status == RUNNING} == {signature}
        and all(h.signature != signature for h in headers if h.status == IDLE)
    )
