"""Keeps ranks together in the sessions that they share: they run, end, leave and fail together."""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import agreement, dealt_input
from collective.coordination.agreement import CLOSING, FAILED, IDLE, LEFT, RUNNING, Header
from collective.coordination.initial_broadcast import broadcast_initial_values
from collective.coordination.preemption import PREEMPTION
from collective.coordination.prepared_run import Membership, PreparedRun, RunAttempt, peers_are_idle
from collective.coordination.run_extension import NO_PART, extension_of
from collective.coordination.session_state import is_end, state_of_session
from collective.errors import RankError
from collective.job.progress import Progress
from collective.job.progress_board import Label, Phase
from collective.ops.communication import carrier_choice, collectives, nccl
from collective.ops.graph import graph_analysis
from collective.tables.table import is_replicated

ENDING = "ends its session"


FORKED = (
    "This process was forked from a rank and is not a rank itself. Only the ranks can run what all "
    "of them run."
)


class _Broken:
    """Is the description of the run that failed half-way, or FORKED, as an attribute; or None.

    From then on nothing is exchanged through shared memory.
    """

    def __get__(self, holder: Any, kind: type) -> str | None:
        return holder.__dict__.get("broken") or carrier_choice.given_up() or None

    def __set__(self, holder: Any, failure: tf.errors.OpError | str) -> None:
        if isinstance(failure, tf.errors.OpError):
            failure = f"{type(failure).__name__}: {failure.message}"
        holder.__dict__["broken"] = failure


class Coordinator:
    """Takes part in the agreement for this rank, over all of its sessions.

    Attributes:
        channel: exchanges headers and reports outside of runs.
        progress: tells the launcher what this rank does.
        failure: the session in which a run failed, and a description; peers are told when they next
            wait for this rank.
        broken: why peers can't be answered: a run that failed half-way, or a fork.
        clock: seconds since 1970 on rank 0, as of the last exchange.
        training_calls: how many calls of functions have trained with all ranks.
    """

    broken = _Broken()

    def __init__(self) -> None:
        self.channel = agreement.SideChannel()
        self.progress = Progress(os.environ)
        self.failure: tuple[Membership, str] | None = None
        self.clock: float | None = None
        self.training_calls = 0
        self._members: dict[Any, Membership] = {}
        self._sessions = 0
        self._dead = False
        # Collectives of two threads would meet the peers' in an undefined order.
        self.one_at_a_time = threading.RLock()
        atexit.register(self.leave_all)
        os.register_at_fork(after_in_child=self._note_fork)
        self._excepthook, sys.excepthook = sys.excepthook, self._note_death

    def _note_death(self, *error: Any) -> None:
        # The launcher ends the job; peers in a collective can't be told.
        self._dead = True
        self._excepthook(*error)
        carrier_choice.die(1)

    def _note_fork(self) -> None:
        self.one_at_a_time = threading.RLock()  # another thread may have held it
        self.broken = FORKED

    # Runs

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
        """Executes a run on all ranks or on none, and returns the values of `fetches`.

        Every rank takes these steps:

            1  clean up    an earlier failure is delivered, a session that is over is refused
            2  equalise    variables initialized before the ranks shared anything become rank 0's
            3  line up     the run's counter starts; peers come out of an earlier evaluation
            4  feed        the extension's feeds, and the ticket that the agreement reads
            5  execute     headers ─► gate ─► collectives ─► updates, as one run of TensorFlow
            6  fail        if 5 fails, peers are told, and all ranks raise what they must
            7  take note   of the clock, the count, an evaluation that peers may go on with
            8  equalise    variables that the run has initialized become rank 0's

        Args:
            original: TensorFlow's `Session.run`; `fetches`, `feeds` and the rest are its arguments.
            session: the session.
            run: the run that was prepared for these fetches and feeds.
        """
        if not run.description:
            fetched = sorted(str(getattr(f, "name", f)) for f in graph_analysis.flatten(fetches))
            run.description = "runs " + ", ".join(fetched)
        with self.one_at_a_time, self.progress:
            member = self.member_of(session)
            attempt = RunAttempt(original, session, member, run, run.description, dict(feeds or {}))
            try:
                self._clean_up(attempt)
                self._equalise_early_variables(attempt)
                self._line_up(attempt)
                self._feed(attempt)
                values, agreed = self._execute(attempt, fetches, options, metadata)
                self._take_note(attempt, agreed)
                self._equalise_initialized(attempt)
                return values
            except tf.errors.OutOfRangeError as error:
                raise run.end_of_data(error, run.description) from None

    def _clean_up(self, attempt: RunAttempt) -> None:
        """Delivers an earlier failure, and refuses a session that is over (step 1)."""
        run, member = attempt.run, attempt.member
        self.deliver_failure()
        self.refuse_if_broken()
        if member.over is not None:
            raise member.over
        for other in self._members.values():
            if other is not member:
                # Two graphs may have collectives of the same names.
                other.part.wait()
        run.label = run.label or Label(attempt.description, run.footprint.shared)
        self.progress.does(run.label)

    def _equalise_early_variables(self, attempt: RunAttempt) -> None:
        """Makes variables equal that were initialized before ranks shared anything (step 2)."""
        state = state_of_session(attempt.session)
        unequal, state.unequal_variables = state.unequal_variables, {}
        variables = [variable for _, variable in sorted(unequal.items())]
        if variables or attempt.run.footprint.initialized:
            self._agree_on(attempt)
            self.progress.enters(Phase.EQUALISING)
        if variables:
            broadcast_initial_values(attempt.original, attempt.session, variables)

    def _line_up(self, attempt: RunAttempt) -> None:
        """Starts the run's counter, and waits for peers in an earlier evaluation (step 3)."""
        gate, member = attempt.run.gate, attempt.member
        if gate is None:
            return
        if member.count is None:
            attempt.original(attempt.session, gate.start)
            member.count = 0
        if member.evaluation not in (None, attempt.signature):
            # Before the run takes data, because peers may still answer the evaluation that this
            # rank has left.
            self._agree_on(attempt)

    def _feed(self, attempt: RunAttempt) -> None:
        """Adds the extension's feeds, and the ticket that the agreement reads (step 4)."""
        run, member = attempt.run, attempt.member
        if run.extended:
            if member.part is NO_PART:
                extension = extension_of(attempt.session.graph)
                member.part = extension.join(attempt.session, member, self)
            gated = run.gate is not None
            attempt.feeds.update(
                member.part.feeds(run.footprint.trains, gated, attempt.feeds, attempt.description)
            )
        ticket = agreement.ticket(member.number, attempt.signature)
        attempt.feeds.update((placeholder.name, ticket) for placeholder in run.tickets)

    def _execute(
        self, attempt: RunAttempt, fetches: Any, options: Any, metadata: Any
    ) -> tuple[Any, list[Any]]:
        """Runs TensorFlow, again while peers are idle, and raises what all ranks raise (steps 5 and
        6).

        Returns:
            The values of the fetches and of the run's targets.
        """
        run, part = attempt.run, attempt.member.part
        while True:
            run.begins()
            self.progress.enters(Phase.WORKING if run.gate is None else Phase.RUNNING)
            try:
                operations = [*run.targets, *run.extra_operations]
                values = attempt.original(
                    attempt.session, [fetches, operations], attempt.feeds, options, metadata
                )
                return values if run.gate is None else nccl.checked(values)
            except tf.errors.OpError as error:
                PREEMPTION.hear(run.wishes)
                started = self._has_started(attempt)
                self.progress.passed += started
                if run.extended and not run.first_gate_opened(started):
                    part.run_stopped()
                if run.repeatable and peers_are_idle(run.disagreement or [], attempt.signature):
                    PREEMPTION.stop(state_of_session(attempt.session), run.footprint)
                    continue
                raise self._error_for_all(attempt, error, started) from None
            except Exception as error:
                # TensorFlow never started the run, for example because of a feed of the wrong
                # shape.
                if run.extended:
                    part.run_stopped()
                self.failure = (attempt.member, f"failed with {type(error).__name__}: {error}")
                raise
            except BaseException:
                # This program is told to end.
                if run.extended:
                    part.abandon()
                raise

    def _has_started(self, attempt: RunAttempt) -> bool:
        """Tells whether the run that has just failed had reached its collectives."""
        gate, member = attempt.run.gate, attempt.member
        if gate is None:
            return bool(attempt.run.footprint.initialized)
        before, member.count = member.count, int(attempt.original(attempt.session, gate.count))
        return member.count != before

    def _error_for_all(
        self, attempt: RunAttempt, error: tf.errors.OpError, started: bool
    ) -> BaseException:
        """Returns the error of a failed run, after telling the peers (step 6)."""
        run, member, description = attempt.run, attempt.member, attempt.description
        if run.disagreement is not None:
            return self.judge(run.disagreement, member, attempt.shared, description) or error
        if started:
            self.broken = error = failure_half_way(error)
            return error
        if isinstance(error, tf.errors.OutOfRangeError):
            if run.idle_run is not None:
                return self._answer_until_all_end(attempt, error)
            return self._end_or_verdict(attempt, self.exchange_headers(attempt.ended), error)
        self.failure = (member, f"failed with {type(error).__name__}: {error.message}")
        return error

    def _answer_until_all_end(
        self, attempt: RunAttempt, error: tf.errors.OutOfRangeError
    ) -> BaseException:
        """Answers the peers' evaluation until they are out of data, too.

        Returns: The error that this rank then raises: `error`, its own end of data, if all goes
        well.
        """
        member, signature, dealt = attempt.member, attempt.signature, attempt.dealt
        member.evaluation = signature
        while True:
            headers = self.exchange_headers(Header(IDLE, member.number, signature, id=dealt))
            running = {h.signature for h in headers if h.status == RUNNING}
            idle = {h.signature for h in headers if h.status == IDLE}
            all_well = all(
                h.status in (RUNNING, IDLE) and h.session == member.number for h in headers
            )
            if all_well and running == {signature}:
                try:
                    self._answer(attempt)
                except tf.errors.OpError as failed:
                    run = attempt.run
                    if run.disagreement is not None:  # A peer's ids that depend on rows.
                        verdict = self.judge(
                            run.disagreement, member, attempt.shared, attempt.description
                        )
                        return verdict or failed
                    self.broken = failed = failure_half_way(failed)
                    return failed
                if PREEMPTION.decided:  # so the peers ask no more
                    return PREEMPTION.error(state_of_session(attempt.session))
            elif all_well and len(running) == 1 and idle == {signature}:
                # The others have finished early, and continue with something else.
                return error
            else:
                return self._end_or_verdict(attempt, headers, error)

    def _answer(self, attempt: RunAttempt) -> None:
        """Takes part in one run of the peers without its own data."""
        idle_run = attempt.run.idle_run
        assert idle_run is not None
        attempt.run.begins()
        self.progress.enters(Phase.ANSWERING)
        feeds = dict(attempt.feeds)
        feeds.update((x.name, value) for x, value in idle_run.feeds)
        if idle_run.states:
            states = [state for _, state in idle_run.states]
            values = attempt.original(attempt.session, states)
            feeds.update((x.name, value) for (x, _), value in zip(idle_run.states, values))
        targets = [idle_run.operations, attempt.run.idle_targets]
        attempt.original(attempt.session, targets, feeds, None, None)

    def _end_or_verdict(
        self, attempt: RunAttempt, headers: list[Header], error: tf.errors.OutOfRangeError
    ) -> BaseException:
        """Returns `error`, unless the headers say that more than data has ended."""
        verdict = dealt_input.difference(attempt.session, headers, self.channel.texts)
        if verdict is None:
            verdict = self.judge(headers, attempt.member, attempt.shared, attempt.description)
        if verdict is None or isinstance(verdict, tf.errors.OutOfRangeError):
            return error
        return verdict

    def _take_note(self, attempt: RunAttempt, agreed: list[Any]) -> None:
        """Notes the clock, the count, and an evaluation that peers may go on with (step 7)."""
        run, member = attempt.run, attempt.member
        if run.targets:
            self.progress.passed += 1
            self.clock = agreement.clock_of(agreed[0]) / 1e6
            PREEMPTION.hear(agreement.wishes_of(agreed[0]))
            if run.unweighed:
                agreement.warn_of_unweighed(run.unweighed, agreement.records_of(agreed[0]))
            is_evaluation = run.idle_run is not None
            member.evaluation = attempt.signature if is_evaluation else None
            member.last_evaluation = attempt if is_evaluation else None
        if run.gate is not None:
            member.count = (member.count or 0) + 1

    def _equalise_initialized(self, attempt: RunAttempt) -> None:
        """Makes variables equal that the run has initialized (step 8)."""
        initialized = attempt.run.footprint.initialized
        if initialized:
            self.progress.enters(Phase.EQUALISING)
            replicated = [v for v in initialized if is_replicated(v)]
            broadcast_initial_values(attempt.original, attempt.session, replicated)

    def restart(self, session: Any) -> None:
        """Prepares for an iterator of `session` that is about to start again."""
        self.refuse_if_broken()
        if session in self._members:
            with self.one_at_a_time, self.progress.does("restarts an iterator"):
                self._members[session].part.iterator_restarts()

    # Agreement outside of runs

    def agree(
        self, header: Header, member: Membership, shared: Sequence[str], description: str
    ) -> None:
        """Agrees with the peers outside of any run, after they have left an evaluation.

        Raises:
            Exception: what all ranks raise if they don't agree.
        """
        headers = self.exchange_headers(header)
        while header.status == RUNNING and peers_are_idle(headers, header.signature):
            headers = self.exchange_headers(header)
        verdict = self.judge(headers, member, shared, description)
        if verdict is not None:
            raise verdict

    def _agree_on(self, attempt: RunAttempt) -> None:
        self.agree(attempt.running, attempt.member, attempt.shared, attempt.description)

    def exchange(
        self, session: Any, name: str, description: str, payload: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns every rank's `payload` (`collective.coordination.barrier`).

        Args:
            session: the session whose ranks meet; None outside of any.
            name: the same on every rank.
            description: says what this rank does, for errors.
            payload: what JSON can hold.
        """
        with self.one_at_a_time, self.progress:
            self.deliver_failure()
            self.refuse_if_broken()
            member = Membership(0, []) if session is None else self.member_of(session)
            if isinstance(member.over, tf.errors.OutOfRangeError):
                raise RankError(agreement.needs_all_ranks(description, member.over))
            if member.over is not None:
                raise member.over
            self.progress.does(description)
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            signature = int.from_bytes(digest, "little") >> 1
            try:
                self.agree(Header(RUNNING, member.number, signature), member, (), description)
            except tf.errors.OutOfRangeError as error:
                raise RankError(agreement.needs_all_ranks(description, error)) from None
            return self.channel.texts(payload)

    def exchange_headers(self, header: Header) -> list[Header]:
        """Returns every rank's header, exchanged outside of any run."""
        self.progress.enters(Phase.AGREEING)
        try:
            return self.hear(self.channel.headers(header))
        except tf.errors.UnknownError as error:
            raise agreement.explained(error) from None

    def hear(self, headers: list[Header]) -> list[Header]:
        """Notes what every rank's header says to all, and returns them."""
        self.progress.passed += 1
        self.clock = headers[0].clock / 1e6
        PREEMPTION.hear(h.wish for h in headers)
        return headers

    def judge(
        self, headers: list[Header], member: Membership, shared: Sequence[str], description: str
    ) -> BaseException | None:
        """Returns what all ranks raise for these headers, and notes whether the session is over.

        Args:
            headers: of all ranks.
            member: this rank's part in the session.
            shared: the names of everything that all ranks must run.
            description: says what this rank does.
        """
        verdict = agreement.verdict(
            headers,
            member.checks,
            lambda: self.channel.texts(agreement.report(description, shared)),
            member.needs_all_data,
            shared,
        )
        member.note(headers, verdict)
        return verdict

    # Ends, departures and failures

    def end(self, session: Any) -> None:
        """Waits for all ranks to come to the end of `session`.

        The peers' runs in it end as if out of data. All ranks then run what a session runs at its
        end, such as a last checkpoint. If the last run was an evaluation, this rank has finished
        it, and first answers the ranks that haven't.
        """
        member = self._members.get(session)
        if member is None or self.broken:
            return
        with self.one_at_a_time, self.progress.does(ENDING):
            self.deliver_failure()
            over = self._leave_part(member)
            if not (over or PREEMPTION.decided) and member.last_evaluation is not None:
                last = dataclasses.replace(member.last_evaluation, description=ENDING)
                self._answer_until_all_end(last, tf.errors.OutOfRangeError(None, None, ""))
                over = member.over is not None or self.broken is not None
            while not over:
                headers = self.exchange_headers(Header(CLOSING, member.number))
                verdict = self.judge(headers, member, (), ENDING)
                over = (
                    isinstance(verdict, RankError)
                    or member.over is not None
                    or all(h.status == CLOSING for h in headers)
                )

    def leave(self, session: Any, error: BaseException | None = None) -> None:
        """Tells the peers that this rank runs nothing more in `session`.

        Their next run there ends as if out of data.

        Args:
            session: the session.
            error: the error with which the session is left, if any.
        """
        state_of_session(session).has_left = True
        if session not in self._members or self.broken:
            return
        with self.one_at_a_time, self.progress.does("leaves its session"):
            member = self._members.pop(session, None)  # after another thread's run
            if member is None or self._leave_part(member):
                return
            if error is None or is_end(error):
                headers = self.exchange_headers(Header(LEFT, member.number))
                self.judge(headers, member, (), "left its session")
                return
        # Most likely the end of this program. If it continues, the peers are told when they next
        # wait for this rank.
        description = f"left its session with {type(error).__name__}: {error}"
        self.failure = self.failure or (member, description)
        self._dead = self._dead or isinstance(error, SystemExit)

    def leave_all(self) -> None:
        """Tells the peers at the end of the program, in case they still wait for this rank."""
        if self._dead or self.broken:
            return
        try:
            self.deliver_failure()
        except RankError:
            return
        for session in list(self._members):
            self.leave(session)

    def _leave_part(self, member: Membership) -> bool:
        """Ends the extension's part, and tells whether the session is over with it."""
        member.part.leave()
        return member.over is not None or self.broken is not None

    def fail(self, session: Any, description: str) -> None:
        """Tells the peers of an error after a run of `session`, once they wait for this rank."""
        if session in self._members:
            with self.one_at_a_time, self.progress:
                self.failure = self.failure or (self._members[session], description)
                self.deliver_failure()

    def deliver_failure(self) -> None:
        """Tells the peers of a failure that this rank survived."""
        if self.failure is None:
            return
        (member, description), self.failure = self.failure, None
        if member.over is None and not self.broken:
            # Peers that wait in that session get the error there. This rank continues, as they do
            # if they survive it.
            self.progress.does(description)
            headers = self.exchange_headers(Header(FAILED, member.number))
            self.judge(headers, member, (), description)

    def refuse_if_broken(self) -> None:
        if self.broken:
            raise _refusal(self.broken)

    def member_of(self, session: Any) -> Membership:
        """Returns this rank's part in `session`, which is numbered when it is first asked for."""
        if session not in self._members:
            state_of_session(session).refuse_if_left()
            state_of_session(session).number = self._sessions = self._sessions + 1
            self._members[session] = Membership.of(self._sessions, session.graph)
        return self._members[session]


_instance: list[Coordinator] = []


def started() -> bool:
    """Tells whether this process has shared a session yet."""
    return bool(_instance)


def instance() -> Coordinator:
    """Returns the process's coordinator.

    It is made when first needed, after the script's first session, whose thread counts TensorFlow
    keeps for all sessions.
    """
    if not _instance:
        _instance.append(Coordinator())
    return _instance[0]


def failure_half_way(error: tf.errors.OpError) -> tf.errors.OpError:
    """Returns what to raise for a run that failed half-way, once peers that wait are told."""
    carrier_choice.give_up()
    return agreement.explained(error)


def _refusal(broken: str) -> RankError:
    """Returns what to raise in place of whatever needs the peers."""
    if broken is FORKED:
        return RankError(FORKED)
    return RankError(
        f"An earlier run failed half-way on rank {collectives.rank()}, and this process can "
        f"exchange nothing more with the other ranks. Start the job again. It failed with: {broken}"
    )
