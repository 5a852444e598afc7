"""The shutdown of a job: which signal goes to the ranks now, and which harsher one when.

    begun by                signals, with the time between them
    ----------------------  -------------------------------------------------------
    a failed rank           TERM, grace, KILL
    TERM to the launcher    TERM, time to save, KILL
    INT                     INT, time to save, TERM, grace, KILL
    HUP, QUIT               the same signal, grace, TERM, grace, KILL
    a second INT or TERM    KILL

A later beginning never puts off a KILL that was due earlier. A scheduler that signals a process
twice at one moment, or the launchers of all hosts, means it once; who presses Ctrl-C twice means
it.
"""

from __future__ import annotations

import math
import signal

# Seconds in which two TERMs are one.
_SAME = 1.0


class ShutdownSchedule:
    """Holds the signals still to be sent. Times are seconds of a clock that only goes forward."""

    def __init__(self, grace: float, time_to_save: float | None = None) -> None:
        """Makes a schedule on which nothing is due.

        Args:
          grace: seconds from TERM to KILL where there is nothing to save.
          time_to_save: seconds that ranks have to save, if they are asked to; by default `grace`.
        """
        self._grace = grace
        self._time_to_save = grace if time_to_save is None else time_to_save
        self._steps: list[tuple[float, signal.Signals]] = []
        self._kill_at = math.inf
        self._requested: tuple[signal.Signals, float] | None = None
        self._told: dict[str, float] = {}  # When the launcher of each host was first told TERM.

    @property
    def begun(self) -> bool:
        return self._kill_at < math.inf

    @property
    def was_requested(self) -> bool:
        """Tells whether somebody told the launcher to stop, and the ranks to save."""
        return self._requested is not None

    def request(self, signum: signal.Signals, now: float, host: str = "") -> None:
        """Begins with a signal that the launcher received, or that of another host."""
        if signum == signal.SIGTERM:
            self._told.setdefault(host, now)
        if signum not in (signal.SIGINT, signal.SIGTERM):
            self.begin(signum, now)
        elif self._requested is None:
            self._requested = signum, now
            self.ask_to_save(signum, now)
        elif signum == self._requested[0] == signal.SIGTERM and now < self._told[host] + _SAME:
            pass
        else:
            self.begin(signal.SIGKILL, now)

    def ask_to_save(self, signum: signal.Signals, now: float) -> None:
        """Begins with `signum` at once, and gives the ranks time to save."""
        self._begin(signum, now, self._time_to_save)

    def begin(self, signum: signal.Signals, now: float) -> None:
        """Begins with `signum` at once."""
        self._begin(signum, now, self._grace)

    def _begin(self, signum: signal.Signals, now: float, patience: float) -> None:
        steps = [(now, signum)]
        if signum not in (signal.SIGTERM, signal.SIGKILL):
            steps.append((now + patience, signal.SIGTERM))
            patience = self._grace
        if signum != signal.SIGKILL:
            steps.append((steps[-1][0] + patience, signal.SIGKILL))
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
