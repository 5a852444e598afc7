"""Runs the exchanges of keys of one session, each during the script's previous run.

    script      run of batch i            run of batch i + 1
    keys        ·  keys of batch i + 1    ·  keys of batch i + 2
                ▲ begin when the ranks have agreed on that run

They run on a separate thread. Every rank starts the same runs of keys, and all of these complete.
If one rank learns something in a run of keys (its data have ended, an id is outside its table), all
ranks learn it; the run that would have used the batch raises it.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.coordination import agreement
from collective.coordination.agreement import (
    AHEAD,
    ENDED,
    EVALUATING,
    FAILED,
    Header,
    SideChannel,
)
from collective.coordination.prepared_run import PreparedRun
from collective.ops.communication.gate import gates_of
from collective.ops.graph.sessions import run_unpatched
from collective.prefetch.graph_split import GraphSplit, key_run


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Describes how a run of keys ended that didn't end well.

    Attributes:
        headers: the ranks' headers; None if this rank failed among the collectives, which leaves
            peers waiting.
        verdict: what all ranks raise for these headers.
        error: what this rank's run failed with; None if the headers say it all.
    """

    headers: list[Header] | None
    verdict: BaseException | None = None
    error: Exception | None = None


class Prefetcher:
    """Runs the exchanges of keys of one session.

    Attributes:
        staged: the number of the batch that the next run takes; None if there is none.

    Args:
        session: the session.
        number: the session's number, the same on every rank.
        channel: the way to the peers outside of runs.
        split: the session's graph, split.
    """

    def __init__(self, session: Any, number: int, channel: SideChannel, split: GraphSplit):
        self._session, self._number, self._channel, self._split = session, number, channel, split
        self._batches = self._count = 0
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._stopped = False
        self.staged: int | None = None
        gate = key_run(split).gate
        assert gate is not None
        self._run(gate.start)

    def _run(self, fetches: Any, feeds: dict[Any, Any] | None = None) -> Any:
        return run_unpatched(self._session, fetches, feeds)

    def exchange(
        self, run: PreparedRun, feeds: dict[Any, Any], trains: bool
    ) -> tuple[int, Outcome | None]:
        """Executes a run of keys immediately.

        Args:
            run: the run.
            feeds: what it is fed with.
            trains: whether the batch is to be trained with.

        Returns:
            The number of the batch that it has staged, and how it failed, if it did.
        """
        self._batches, self._stopped = self._batches + 1, False
        feeds = {**feeds, self._split.start.wait.name: 1}
        return self._batches, self._exchange(run, self._batches, feeds, trains)

    def start(self, trains: bool) -> None:
        """Starts a run of keys, which waits for the agreement on the script's run."""
        self._batches += 1
        run, batch, self._stopped = key_run(self._split), self._batches, False

        def work() -> None:
            try:
                self._outcome = self._exchange(run, batch, {}, trains)
            except Exception as error:
                # The session was closed meanwhile.
                self._outcome = Outcome(None, None, error)
            self.staged = batch if self._outcome is None and not self._stopped else None

        self._thread = start_thread(work)

    def stop(self) -> None:
        """Ends the run of keys that waits for an agreement which didn't come about."""
        if self._thread is not None:
            self._stopped = True
            self._run(self._split.start.refuse)
            self.join()

    def join(self) -> None:
        """Waits for the run of keys, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Gives up the run of keys without waiting for it: this program is about to end."""
        self._thread = None

    def outcome(self) -> Outcome | None:
        """Returns how the last run of keys failed, if it did, and forgets it."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def drop(self) -> Outcome | None:
        """Waits for the run of keys and drops its batch; returns how it failed, if it did."""
        self.join()
        self.staged = None
        self._run(self._split.stage.clear)
        return self.outcome()

    def _exchange(
        self, run: PreparedRun, batch: int, feeds: dict[Any, Any], trains: bool
    ) -> Outcome | None:
        """Executes a run of keys, and counts it if all ranks had agreed on it."""
        signature, stage = run.footprint.signature, self._split.stage
        ticket = agreement.ticket(self._number, signature)
        feeds = {**feeds, stage.number.name: batch, run.tickets[0].name: ticket}
        try:
            self._run([stage.put, run.targets], feeds)
            self._count += 1
            return None
        except tf.errors.OpError as error:
            if self._stopped:
                return None
            headers, run.disagreement = run.disagreement, None
            if headers is not None:
                self._count += 1
                return self._outcome_of(run, headers)
            if self._has_started(run):
                return Outcome(None, None, error)
            ended = isinstance(error, tf.errors.OutOfRangeError)
            header = Header(
                ENDED if ended else FAILED,
                self._number,
                signature,
                EVALUATING if ended and not trains else 0,
            )
            return self._outcome_of(run, self._channel.headers(header, AHEAD), error)
        except Exception as error:
            # TensorFlow never started the run: a feed of a wrong shape, for one.
            header = Header(FAILED, self._number, signature)
            return self._outcome_of(run, self._channel.headers(header, AHEAD), error)

    def _has_started(self, run: PreparedRun) -> bool:
        """Tells whether a run of keys that has failed had come as far as its collectives."""
        assert run.gate is not None
        before, self._count = self._count, int(self._run(run.gate.count))
        return self._count != before

    def _outcome_of(
        self, run: PreparedRun, headers: list[Header], error: Exception | None = None
    ) -> Outcome:
        """Reaches the verdict here and now, where all ranks' runs of keys are.

        Later a rank may run something else, or nothing.
        """
        description = "exchanges the keys of a batch ahead (prefetch_keys)"
        if error is not None and not isinstance(error, tf.errors.OutOfRangeError):
            description = f"failed with {type(error).__name__}: {error}"
        report = agreement.report(description, run.footprint.shared)
        verdict = agreement.verdict(
            headers,
            gates_of(self._session.graph).checks,
            lambda: self._channel.texts(report, AHEAD),
        )
        return Outcome(headers, verdict, error)


def start_thread(work: Callable[[], None]) -> threading.Thread:
    """Starts a thread that executes `work`, a run of keys."""

    def run() -> None:
        _threads.runs_keys = True
        work()

    thread = threading.Thread(target=run, name="collective keys", daemon=True)
    thread.start()
    return thread


def runs_keys() -> bool:
    """Tells whether the calling thread executes a run of keys: it changes nothing of the graph."""
    return getattr(_threads, "runs_keys", False)


_threads = threading.local()
