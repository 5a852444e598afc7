"""How a rank takes part in the sessions that all ranks share: agreeing on each run, ending, leaving
and failing together.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import sys
import threading
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.coordination import agreement
from collective.coordination.agreement import CLOSING, ENDED, FAILED, IDLE, LEFT, RUNNING, Header
from collective.coordination.initial_broadcast import make_equal
from collective.coordination.prepared_run import Membership, PreparedRun, finds_idle
from collective.coordination.progress import Progress
from collective.coordination.run_extension import NO_PART, extension_of
from collective.coordination.session_state import state_of_session
from collective.errors import RankError
from collective.launch.progress_board import Label, Phase
from collective.ops import collectives, graph_analysis
from collective.ops.gate import gates_of
from collective.tables.table import is_replicated


class Coordinator:
    """This rank's side of the agreement, over all of its sessions."""

    def __init__(self) -> None:
        self.channel = agreement.SideChannel()
        self.progress = Progress(os.environ)
        self.members: dict[Any, Membership] = {}
        self.count = 0
        # said to the peers when they next wait for this rank
        self.failure: tuple[Membership, str] | None = None
        # a run failed half-way: peers can't be answered
        self.broken: str | None = None
        atexit.register(self.leave_all)
        self._hook, sys.excepthook = sys.excepthook, self._dying
        self._dead = False
        self._process = os.getpid()
        # rank 0's, as of the last exchange: seconds since 1970
        self.clock: float | None = None
        # two threads' collectives would meet the peers' in no order
        self._one_at_a_time = threading.RLock()

    def _dying(self, *error: Any) -> None:
        # the launcher ends the job; peers in a collective can't be told
        self._dead = True
        self._hook(*error)

    # -- one run

    def run(
        self,
        original: Any,
        session: Any,
        run: PreparedRun,
        fetches: Any,
        feeds: Any,
        options: Any,
        metadata: Any,
    ) -> Any:
        """TensorFlow's `original(session, fetches, feeds, options, metadata)`, on all ranks or on
        none.
        """
        doing = "runs " + ", ".join(
            sorted(str(getattr(f, "name", f)) for f in graph_analysis.flatten(fetches))
        )
        with self._one_at_a_time, self.progress:
            try:
                return self._run(original, session, run, doing, fetches, feeds, options, metadata)
            except tf.errors.OutOfRangeError as error:
                raise run.missed(error, doing) from None

    def _run(
        self,
        original: Any,
        session: Any,
        run: PreparedRun,
        doing: str,
        fetches: Any,
        feeds: Any,
        *more: Any,
    ) -> Any:
        member = self.member(session)
        self.say_failure()
        self.refuse_if_broken()
        if member.over is not None:
            raise member.over
        for other in self.members.values():
            if other is not member:
                # Two graphs may have collectives of the same names.
                other.part.wait()
        run.label = run.label or Label(doing, run.footprint.shared)
        self.progress.does(run.label)
        unequal, state_of_session(session).unequal_variables = (
            state_of_session(session).unequal_variables,
            {},
        )
        early = [v for _, v in sorted(unequal.items())]
        if early or run.footprint.initialized:
            self.settle(Header(RUNNING, member.number, run.footprint.signature), member, run, doing)
            self.progress.enters(Phase.EQUALISING)
        make_equal(original, session, early)
        if run.gate is not None and member.count is None:
            original(session, run.gate.start)
            member.count = 0
        if run.gate is not None and member.evaluation not in (None, run.footprint.signature):
            # Before it takes data: peers may still answer that evaluation, which this rank has
            # left.
            self.settle(Header(RUNNING, member.number, run.footprint.signature), member, run, doing)
        if run.extended:
            if member.part is NO_PART:
                member.part = extension_of(session.graph).join(session, member, self)
            more_feeds = member.part.feeds(
                run.footprint.trains, run.gate is not None, feeds or {}, doing
            )
            feeds = {**(feeds or {}), **more_feeds}
        ticket = [1, member.number, run.footprint.signature, agreement.now()]
        feeds = {**(feeds or {}), **{placeholder.name: ticket for placeholder in run.tickets}}
        out = None
        while out is None:
            run.disagreement = None
            self.progress.enters(Phase.WORKING if run.gate is None else Phase.RUNNING)
            try:
                out = original(session, [fetches, run.targets], feeds, *more)
            except tf.errors.OpError as error:
                started = self.has_started(original, session, member, run)
                self.progress.passed += started
                if run.extended and not run.opened(started):
                    member.part.run_stopped()
                if run.repeatable and finds_idle(run.disagreement or [], run.footprint.signature):
                    continue
                answer = functools.partial(self.answer, original, session, run, feeds)
                raise self.after(error, started, member, run, doing, answer) from None
            # TensorFlow never started it: a feed of a wrong shape, say
            except Exception as error:
                if run.extended:
                    member.part.run_stopped()
                self.failure = (member, f"failed with {type(error).__name__}: {error}")
                raise
            except BaseException:  # this program is told to end
                if run.extended:
                    member.part.abandon()
                raise
        if run.targets:
            self.progress.passed += 1
            self.clock = int(out[1][0]) / 1e6
            member.evaluation = run.footprint.signature if run.answer is not None else None
            member.answers = (
                (run, functools.partial(self.answer, original, session, run, feeds))
                if run.answer
                else None
            )
        if run.gate is not None:
            member.count = (member.count or 0) + 1
        if run.footprint.initialized:
            self.progress.enters(Phase.EQUALISING)
            make_equal(
                original, session, [v for v in run.footprint.initialized if is_replicated(v)]
            )
        return out[0]

    def refuse_if_broken(self) -> None:
        if self.broken:
            raise RankError(
                f"An earlier run failed half-way on rank {collectives.rank()} and "
                f"left its peers waiting; "
                f"start again. It failed with: {self.broken}"
            )

    def has_started(
        self, original: Any, session: Any, member: Membership, run: PreparedRun
    ) -> bool:
        """Whether the run that has just failed had come as far as its collectives."""
        if run.gate is None:
            return bool(run.footprint.initialized)
        before, member.count = member.count, int(original(session, run.gate.count))
        return member.count != before

    def after(
        self,
        error: tf.errors.OpError,
        started: bool,
        member: Membership,
        run: PreparedRun,
        doing: str,
        answer: Callable[[], None],
    ) -> BaseException:
        """What to raise for a run that failed with `error`, once the peers know what they must
        know.
        """
        if run.disagreement is not None:
            return self.judged(run.disagreement, member, run, doing) or error
        if started:
            self.broken = f"{type(error).__name__}: {error.message}"
            return error
        if isinstance(error, tf.errors.OutOfRangeError):
            if run.answer is not None:
                return self.idle(error, member, run, doing, answer)
            evaluating = 0 if run.footprint.trains else agreement.EVALUATING
            ended = Header(ENDED, member.number, run.footprint.signature, evaluating)
            judged = self.judged(self.headers(ended), member, run, doing)
            return error if isinstance(judged, tf.errors.OutOfRangeError) else judged or error
        self.failure = (member, f"failed with {type(error).__name__}: {error.message}")
        return error

    def idle(
        self,
        error: tf.errors.OutOfRangeError,
        member: Membership,
        run: PreparedRun,
        doing: str,
        answer: Callable[[], None],
    ) -> BaseException:
        """Answers the peers' evaluation until all of them are out of data, too; then what to raise
        here.
        """
        mine = member.evaluation = run.footprint.signature
        while True:
            headers = self.headers(Header(IDLE, member.number, mine))
            running = {h.signature for h in headers if h.status == RUNNING}
            alike = all(h.status in (RUNNING, IDLE) and h.session == member.number for h in headers)
            if alike and running == {mine}:
                try:
                    answer()
                except tf.errors.OpError as failed:
                    self.broken = f"{type(failed).__name__}: {failed.message}"
                    return failed
            elif (
                alike
                and len(running) == 1
                and all(h.signature == mine for h in headers if h.status == IDLE)
            ):
                return error  # the others have finished early, and go on to something else
            else:
                judged = self.judged(headers, member, run, doing)
                return error if isinstance(judged, tf.errors.OutOfRangeError) else judged or error

    def answer(self, original: Any, session: Any, run: PreparedRun, feeds: dict[Any, Any]) -> None:
        assert run.answer is not None
        self.progress.enters(Phase.ANSWERING)
        states = (
            original(session, [now for _, now in run.answer.states]) if run.answer.states else []
        )
        given = run.answer.feeds + [(x, value) for (x, _), value in zip(run.answer.states, states)]
        original(
            session,
            [run.answer.operations, run.answering],
            {**feeds, **{x.name: value for x, value in given}},
            None,
            None,
        )

    def settle(
        self, header: Header, member: Membership, run: PreparedRun | None, doing: str
    ) -> None:
        """Agrees outside of any run, when peers have come out of an evaluation that they still
        answered; raises what all raise.
        """
        headers = self.headers(header)
        while header.status == RUNNING and finds_idle(headers, header.signature):
            headers = self.headers(header)  # they hear of it, and come here, too
        judged = self.judged(headers, member, run, doing)
        if judged is not None:
            raise judged

    def headers(self, header: Header) -> list[Header]:
        """Every rank's header, exchanged outside of any run."""
        self.progress.enters(Phase.AGREEING)
        headers = self.channel.headers(header)
        self.progress.passed += 1
        self.clock = headers[0].clock / 1e6
        return headers

    def judged(
        self, headers: list[Header], member: Membership, run: PreparedRun | None, doing: str
    ) -> BaseException | None:
        names = list(run.footprint.shared) if run else []
        judged = agreement.verdict(
            headers, member.checks, lambda: self.channel.texts({"doing": doing, "shared": names})
        )
        self.conclude(headers, judged, member)
        return judged

    def conclude(
        self, headers: list[Header], judged: BaseException | None, member: Membership
    ) -> None:
        """Notes whether the session is over."""
        if any(h.status in (LEFT, FAILED) for h in headers) or isinstance(judged, RankError):
            member.over = judged or tf.errors.OutOfRangeError(None, None, "this session is closed")

    def meet(
        self, session: Any, what: str, doing: str, mine: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Every rank's `mine`, if all meet for the same (see `collective.coordination.barrier`); `doing`
        is for the error if not.
        """
        with self._one_at_a_time, self.progress:
            self.say_failure()
            self.refuse_if_broken()
            member = Membership(0, []) if session is None else self.member(session)
            if isinstance(member.over, tf.errors.OutOfRangeError):
                raise RankError(agreement.takes_all(doing, member.over))
            if member.over is not None:
                raise member.over
            self.progress.does(doing)
            signature = (
                int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")
                >> 1
            )
            try:
                self.settle(Header(RUNNING, member.number, signature), member, None, doing)
            except tf.errors.OutOfRangeError as error:
                raise RankError(agreement.takes_all(doing, error)) from None
            return self.channel.texts(mine)

    def restart(self, session: Any) -> None:
        """Before an iterator of `session` starts anew."""
        self.refuse_if_broken()
        if session in self.members:
            with self._one_at_a_time, self.progress.does("starts an iterator anew"):
                self.members[session].part.iterator_restarts()

    # -- coming and going

    def member(self, session: Any) -> Membership:
        if session not in self.members:
            self.count += 1
            self.members[session] = Membership(self.count, gates_of(session.graph).checks)
        return self.members[session]

    def end(self, session: Any) -> None:
        """Waits for all ranks to come to the end of `session`; the peers' runs there end as if out
        of data.

        What runs at its end, a last checkpoint for one, all ranks then run. If the last run was an
        evaluation, this rank has no more to evaluate, and first answers those that have.
        """
        member = self.members.get(session)
        if member is None or self.broken:
            return
        with self._one_at_a_time, self.progress.does("ends its session"):
            self.say_failure()
            over = self._leave_part(member)
            if not over and member.answers is not None:
                run, answer = member.answers
                self.idle(
                    tf.errors.OutOfRangeError(None, None, ""),
                    member,
                    run,
                    "ends its session",
                    answer,
                )
                over = member.over is not None or self.broken is not None
            while not over:
                headers = self.headers(Header(CLOSING, member.number))
                judged = self.judged(headers, member, None, "ends its session")
                over = (
                    isinstance(judged, RankError)
                    or member.over is not None
                    or all(h.status == CLOSING for h in headers)
                )

    def _leave_part(self, member: Membership) -> bool:
        """Ends the extension's part, and tells whether the session is over with it."""
        member.part.leave()
        return member.over is not None or self.broken is not None

    def leave(self, session: Any, error: BaseException | None = None) -> None:
        """Tells the peers that this rank runs nothing more in `session`: their next run there ends
        as if out of data.

        `error` is what it is left with, if anything.
        """
        member = self.members.pop(session, None)
        if member is None or self.broken:
            return
        with self._one_at_a_time, self.progress.does("leaves its session"):
            if self._leave_part(member):
                return
        if error is not None and not is_end(error):
            # Most likely the end of this program. Should it go on, the peers hear of it when they
            # next wait for this rank.
            self.failure = self.failure or (
                member,
                f"left its session with {type(error).__name__}: {error}",
            )
            self._dead = self._dead or isinstance(error, SystemExit)
            return
        with self._one_at_a_time, self.progress.does("leaves its session"):
            self.judged(self.headers(Header(LEFT, member.number)), member, None, "left its session")

    def say_failure(self) -> None:
        """Delivers a failure that this rank survived."""
        if self.failure is None:
            return
        (member, doing), self.failure = self.failure, None
        if member.over is None:
            # Peers that wait in that session get the error there. This rank goes on, as they do if
            # they survive it.
            self.progress.does(doing)
            self.judged(self.headers(Header(FAILED, member.number)), member, None, doing)

    def leave_all(self) -> None:
        """At the end of the program: whoever still waits for this rank in an open session is told."""
        # a forked child is no rank
        if self._dead or self.broken or self._process != os.getpid():
            return
        try:
            self.say_failure()
        except RankError:
            return
        for session in list(self.members):
            self.leave(session)


def is_end(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return isinstance(error, (tf.errors.OutOfRangeError, StopIteration, GeneratorExit))


_coordinator: list[Coordinator] = []


def started() -> bool:
    """Whether this process has shared a session yet."""
    return bool(_coordinator)


def of_process() -> Coordinator:
    """The process's own; made at the first need, after the user's first session, whose thread
    counts TensorFlow keeps.
    """
    if not _coordinator:
        _coordinator.append(Coordinator())
    return _coordinator[0]
