"""The runs of keys of one session: each beside the run of the script before it, on a thread of its
own.

    script      run of batch i            run of batch i + 1
    keys        ·  keys of batch i + 1    ·  keys of batch i + 2
                ▲ begin when the ranks have agreed on the run beside them

So every rank has started the same runs of keys, and all of them come to their end. What one learns,
that the data end, say, or that an id is outside its table, all ranks learn in it, and it is raised
by the run that would have used its batch.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.agreement import (
    AHEAD,
    ENDED,
    EVALUATING,
    FAILED,
    Header,
    SideChannel,
    now,
    verdict,
)
from collective.coordination.prepared_run import PreparedRun
from collective.ops.gate import gates_of
from collective.ops.sessions import run_unpatched
from collective.prefetch.graph_split import GraphSplit, run_of_keys


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run of keys ended, if not well.

    Attributes:
        headers: what the ranks said of themselves; None if this rank failed among the collectives,
            which leaves peers waiting.
        judged: what all ranks raise for that.
        error: what this rank's run failed with; None if the headers say it all.
    """

    headers: list[Header] | None
    judged: BaseException | None = None
    error: Exception | None = None


class Prefetcher:
    """Those of one session.

    Attributes:
        staged: the number of the batch that the next run takes; None if there is none.

    Args:
        session: the session.
        number: of the session, alike on every rank.
        channel: the way to the peers outside of runs.
        cut: through the session's graph.
    """

    def __init__(self, session: Any, number: int, channel: SideChannel, cut: GraphSplit):
        self._session, self._number, self._channel, self.cut = session, number, channel, cut
        self._batches = self._count = 0
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._stopped = False
        self.staged: int | None = None
        gate = self.run.gate
        assert gate is not None
        self._run(gate.start)

    def _run(self, fetches: Any, feeds: dict[Any, Any] | None = None) -> Any:
        return run_unpatched(self._session, fetches, feeds)

    @property
    def run(self) -> PreparedRun:
        """Of keys that come from the iterator."""
        return run_of_keys(self.cut)

    def exchange(
        self, run: PreparedRun, feeds: dict[Any, Any], trains: bool
    ) -> tuple[int, Outcome | None]:
        """Executes `run`, of keys, fed with `feeds`: (the number of the batch that it has staged,
        how it failed).

        `trains`: whether the batch is to be trained with.
        """
        self._batches, self._stopped = self._batches + 1, False
        return self._batches, self._exchange(
            run, self._batches, {**feeds, self.cut.wait.name: 1}, trains
        )

    def start(self, trains: bool) -> None:
        """Starts a run of keys, which waits for the agreement on the run beside it."""
        self._batches += 1
        run, batch, self._stopped = self.run, self._batches, False

        def work() -> None:
            _threads.of_keys = True
            try:
                self._outcome = self._exchange(run, batch, {}, trains)
            except Exception as error:  # the session was closed meanwhile
                self._outcome = Outcome(None, None, error)
            self.staged = batch if self._outcome is None and not self._stopped else None

        self._thread = threading.Thread(target=work, name="collective keys", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the run of keys that waits for an agreement which didn't come about."""
        if self._thread is not None:
            self._stopped = True
            self._run(self.cut.refuse)
            self.join()

    def join(self) -> None:
        """Waits for the run of keys, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Never waits for it: this program is about to end."""
        self._thread = None

    def outcome(self) -> Outcome | None:
        """How the last run of keys failed; told once."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def drop(self) -> Outcome | None:
        """Forgets what was taken ahead, once that has come to its end."""
        self.join()
        self.staged = None
        self._run(self.cut.forget)
        return self.outcome()

    def _exchange(
        self, run: PreparedRun, batch: int, feeds: dict[Any, Any], trains: bool
    ) -> Outcome | None:
        signature = run.footprint.signature
        feeds = {
            **feeds,
            self.cut.number.name: batch,
            run.tickets[0].name: [1, self._number, signature, now()],
        }
        try:
            self._run([self.cut.stage, run.targets], feeds)
            self._count += 1
            return None
        except tf.errors.OpError as error:
            if self._stopped:
                return None
            headers, run.disagreement = run.disagreement, None
            if headers is not None:
                self._count += 1
                return self._heard(run, headers)
            assert run.gate is not None
            before, self._count = self._count, int(self._run(run.gate.count))
            if self._count != before:
                return Outcome(None, None, error)
            ended = isinstance(error, tf.errors.OutOfRangeError)
            header = Header(
                ENDED if ended else FAILED,
                self._number,
                signature,
                EVALUATING if ended and not trains else 0,
            )
            return self._heard(run, self._channel.headers(header, AHEAD), error)
        except Exception as error:  # a feed of a wrong shape, say: TensorFlow never started it
            return self._heard(
                run, self._channel.headers(Header(FAILED, self._number, signature), AHEAD), error
            )

    def _heard(
        self, run: PreparedRun, headers: list[Header], error: Exception | None = None
    ) -> Outcome:
        """Here and now, where all ranks' runs of keys are: a rank may run something else next, or
        nothing.
        """
        doing = "exchanges the keys of a batch ahead (prefetch_keys)"
        if error is not None and not isinstance(error, tf.errors.OutOfRangeError):
            doing = f"failed with {type(error).__name__}: {error}"
        mine = {"doing": doing, "shared": list(run.footprint.shared)}
        checks = gates_of(self._session.graph).checks
        return Outcome(
            headers, verdict(headers, checks, lambda: self._channel.texts(mine, AHEAD)), error
        )


def is_of_keys() -> bool:
    """Whether the thread that asks executes a run of keys: it changes nothing of the graph."""
    return getattr(_threads, "of_keys", False)


_threads = threading.local()
