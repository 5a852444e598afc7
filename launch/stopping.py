"""How a job is brought to its end: which signal goes to the ranks now, and which harsher one when.

=====================  ================================================
begun by               signals, `grace` seconds apart
=====================  ================================================
a failed rank          TERM, KILL
TERM to the launcher   TERM, KILL
INT, HUP, QUIT         the same signal, TERM, KILL
a second INT           KILL
=====================  ================================================

What is begun later never puts off a KILL that was due earlier.
"""

from __future__ import annotations

import math
import signal


class Stopping:
    """The signals still to be sent. Times are seconds of any clock that only goes forward."""

    def __init__(self, grace: float):
        self._grace = grace
        self._steps: list[tuple[float, signal.Signals]] = []
        self._kill_at = math.inf
        self._interrupts = 0

    @property
    def begun(self) -> bool:
        return self._kill_at < math.inf

    def ask(self, signum: signal.Signals, now: float) -> None:
        """Begins with a signal that the launcher received."""
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                signum = signal.SIGKILL
        self.begin(signum, now)

    def begin(self, signum: signal.Signals, now: float) -> None:
        """Begins with `signum` at once."""
        order: list[signal.Signals] = (
            [signum] if signum == signal.SIGKILL else [signum, signal.SIGKILL]
        )
        if signum not in (signal.SIGTERM, signal.SIGKILL):
            order.insert(1, signal.SIGTERM)
        steps = [(now + number * self._grace, step) for number, step in enumerate(order)]
        self._kill_at = min(self._kill_at, steps[-1][0])
        self._steps = [
            (when, step) for when, step in steps[:-1] if when < self._kill_at or step == signum
        ]
        self._steps.append((self._kill_at, signal.SIGKILL))

    def due(self, now: float) -> list[signal.Signals]:
        """Takes the signals whose time has come."""
        ready = [step for when, step in self._steps if when <= now]
        self._steps = self._steps[len(ready) :]
        return ready

    def next_time(self) -> float:
        """When the next signal is due; infinity if none is."""
        return self._steps[0][0] if self._steps else math.inf

    def gave_up_at(self, patience: float) -> float:
        """When even KILL has had its time."""
        return self._kill_at + patience
