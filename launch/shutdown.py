"""The shutdown of a job: which signal goes to the ranks now, and which harsher one when.

    begun by               signals, `grace` seconds apart
    ---------------------  -------------------------------
    a failed rank          TERM, KILL
    TERM to the launcher   TERM, KILL
    INT, HUP, QUIT         the same signal, TERM, KILL
    a second INT           KILL

A later beginning never puts off a KILL that was due earlier.
"""

from __future__ import annotations

import math
import signal


class ShutdownSchedule:
    """Holds the signals still to be sent. Times are seconds of a clock that only goes forward."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._steps: list[tuple[float, signal.Signals]] = []
        self._kill_at = math.inf
        self._interrupts = 0

    @property
    def begun(self) -> bool:
        return self._kill_at < math.inf

    def request(self, signum: signal.Signals, now: float) -> None:
        """Begins with a signal that the launcher received."""
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                signum = signal.SIGKILL
        self.begin(signum, now)

    def begin(self, signum: signal.Signals, now: float) -> None:
        """Begins with `signum` at once."""
        order = [signum]
        if signum not in (signal.SIGTERM, signal.SIGKILL):
            order.append(signal.SIGTERM)
        if signum != signal.SIGKILL:
            order.append(signal.SIGKILL)
        steps = [(now + number * self._grace, step) for number, step in enumerate(order)]
        self._kill_at = min(self._kill_at, steps[-1][0])
        self._steps = [
            (when, step) for when, step in steps[:-1] if when < self._kill_at or step == signum
        ]
        self._steps.append((self._kill_at, signal.SIGKILL))

    def take_due(self, now: float) -> list[signal.Signals]:
        """Takes the signals whose time has come."""
        due = [step for when, step in self._steps if when <= now]
        self._steps = self._steps[len(due) :]
        return due

    def next_time(self) -> float:
        """Returns when the next signal is due; infinity if none is."""
        return self._steps[0][0] if self._steps else math.inf

    def deadline(self, patience: float) -> float:
        """Returns when even KILL has had its time."""
        return self._kill_at + patience
