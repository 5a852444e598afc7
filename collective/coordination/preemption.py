"""Stops all ranks after the same step where one of them is told to: a job is preempted.

    a signal ──▶ this rank's wish ──▶ header of the next run ──▶ heard by all ranks: decided
                                                                          │
    the first run after that one which would train or take data: Preempted ◀┘

The wish travels with the headers that ranks exchange anyway, so all of them hear it with the same
run or meeting, complete that, and stop. A MonitoredSession ends as if out of data: its hooks save a
last checkpoint. A program with a plain session may catch `Preempted`, save, and raise it again. In
a session that has raised it once more can be run, by all ranks alike.

A rank alone decides by itself, between two runs.
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
    """What is remembered of a session here (`collective.coordination.session_state`)."""

    is_stopping: bool


class StoppableRun(Protocol):
    """What a run executes (`collective.coordination.run_analysis`)."""

    @property
    def trains(self) -> bool: ...

    @property
    def takes_data(self) -> bool: ...


class Preemption:
    """Holds this rank's wish, and what the ranks have decided.

    Attributes:
        decided: the signal for which all ranks stop; 0 while they go on.
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
        """Tells whether this rank stops before it trains any more, or takes data."""
        return bool(self.decided) or bool(self.wish) and collectives.size() == 1

    def watch(self) -> None:
        """Takes stop signals for wishes from now on: there is something to save."""
        self._signals.watch()

    def unwatch(self) -> None:
        """Leaves stop signals to the program again.

        A wish that nobody has heard by then is no longer one to save something first.
        """
        self._signals.unwatch(unheard=not self.decided)

    def hear(self, wishes: Iterable[int]) -> None:
        """Takes note of all ranks' wishes, which all of them hear at the same time."""
        if self.decided:
            return
        self.decided = max(wishes, default=0)
        if self.decided and collectives.rank() == 0:
            name = signal.Signals(self.decided).name
            ranks = "all ranks stop" if collectives.size() > 1 else "training stops"
            print(f"collective: {name}: {ranks} after this step", file=sys.stderr, flush=True)

    def stop(self, session: StoppableSession, run: StoppableRun) -> None:
        """Refuses a run that would train or take data once the ranks stop.

        Args:
            session: the state of the session where it would run.
            run: what it would execute.

        Raises:
            Preempted: it does, and the session was not told before.
        """
        if self.is_told and not session.is_stopping and (run.trains or run.takes_data):
            raise self.error(session)

    def raise_if_decided(self) -> None:
        """Refuses to begin something that would take a while.

        Raises:
            Preempted: the ranks stop.
        """
        if self.decided:
            raise self._error()

    def error(self, session: StoppableSession) -> Preempted:
        """Returns what to raise in `session`, which may run on afterwards."""
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
