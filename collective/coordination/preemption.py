"""Stops all ranks after the same step if one of them is told to stop: the job is preempted.

    a signal ──▶ this rank's wish ──▶ header of the next run ──▶ heard by all ranks: decided
                                                                          │
    the first run after that one which would train or take data: Preempted ◀┘

The wish is sent with the headers that ranks exchange anyway, so all ranks learn of it in the same
run or meeting, complete that, and stop. A MonitoredSession ends as if out of data: its hooks save a
last checkpoint. A program with a plain session may catch `Preempted`, save, and raise it again.
After a session has raised it once, all ranks may run more in it.

A single rank decides by itself, between two runs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from typing import Protocol

from collective.coordination.stop_signals import StopSignals
from collective.errors import Preempted
from collective.ops.communication import collectives


class StoppableSession(Protocol):
    """The state of a session used here (`collective.coordination.session_state`)."""

    is_stopping: bool


class StoppableRun(Protocol):
    """The part of a run used here (`collective.coordination.run_analysis`)."""

    @property
    def trains(self) -> bool: ...

    @property
    def takes_data(self) -> bool: ...


class Preemption:
    """Holds this rank's wish, and the ranks' decision.

    Attributes:
        decided: the signal for which all ranks stop; 0 while they continue.
    """

    def __init__(self) -> None:
        self.decided = 0
        self._signals = StopSignals()

    @property
    def wish(self) -> int:
        """Returns the signal by which this rank was told to stop; 0 if it wasn't."""
        return self._signals.received

    @property
    def is_told(self) -> bool:
        """Tells whether this rank stops before it trains or takes data again."""
        return bool(self.decided) or bool(self.wish) and collectives.size() == 1

    def watch(self) -> None:
        """From now on treats stop signals as wishes, because there is something to save."""
        self._signals.watch()

    def unwatch(self) -> None:
        """Leaves stop signals to the program again.

        A wish that hasn't been shared by then no longer asks to save first.
        """
        self._signals.unwatch(unheard=not self.decided)

    def hear(self, wishes: Iterable[int]) -> None:
        """Notes all ranks' wishes, which all ranks learn of at the same time."""
        if self.decided:
            return
        self.decided = max(wishes, default=0)
        if self.decided and collectives.rank() == 0:
            name = signal.Signals(self.decided).name
            what = "training stops after this step"
            if collectives.size() > 1:
                what = "all ranks stop after this step, or before they train again"
            print(f"collective: {name}: {what}", file=sys.stderr, flush=True)

    def stop(self, session: StoppableSession, run: StoppableRun) -> None:
        """Refuses a run that would train or take data after the ranks have decided to stop.

        Args:
            session: the state of the session in which it would run.
            run: what it would execute.

        Raises:
            Preempted: it does, and the session was not told before.
        """
        if self.is_told and not session.is_stopping and (run.trains or run.takes_data):
            raise self.error(session)

    def raise_if_decided(self) -> None:
        """Refuses to begin something that takes a while.

        Raises:
            Preempted: the ranks stop.
        """
        if self.decided:
            raise self._error()

    def error(self, session: StoppableSession) -> Preempted:
        """Returns the error to raise in `session`, which may continue to run afterwards."""
        self.ends(session)
        return self._error()

    def ends(self, session: StoppableSession) -> None:
        """Lets `session` run what belongs to its end."""
        session.is_stopping = True
        if collectives.size() == 1:
            self.hear([self.wish])

    def _error(self) -> Preempted:
        return Preempted(128 + self.decided)


PREEMPTION = Preemption()
