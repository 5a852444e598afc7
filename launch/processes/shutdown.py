"""The shutdown of a job: which signal goes to the ranks now, and which harsher one when.

    begun by                signals, with the time between them
    ----------------------  -------------------------------------------------------
    a failed rank           TERM, grace, KILL
    TERM to the launcher    TERM, time to save, KILL
    INT                     INT, time to save, TERM, grace, KILL
    HUP, QUIT               the same signal, grace, TERM, grace, KILL
    a second INT or TERM    KILL

A later beginning never puts off a KILL that was due earlier. Who signals the launchers of all
hosts means it once, as a Ctrl-C that srun or mpirun passes on to all of them; so does a scheduler
that sends TERM to a process twice at one moment. Who presses Ctrl-C twice means it. Slurm sends
TERM by several ways, seconds apart where it is busy, and KILL by itself: there all TERMs are one.
"""

from __future__ import annotations

import math
import signal

# Seconds in which two TERMs to one launcher are one.
_SAME = 1.0


class ShutdownSchedule:
    """Holds the signals still to be sent. Times are seconds of a clock that only goes forward."""

    def __init__(
        self, grace: float, time_to_save: float | None = None, term_counts_once: bool = False
    ) -> None:
        """Makes a schedule on which nothing is due.

        Args:
          grace: seconds from TERM to KILL where there is nothing to save.
          time_to_save: seconds that ranks have to save, if they are asked to; by default `grace`.
          term_counts_once: TERM is sent by who kills the job himself when its time is over.
        """
        self._term_counts_once = term_counts_once
        self._grace = grace
        self._time_to_save = grace if time_to_save is None else time_to_save
        self._steps: list[tuple[float, signal.Signals]] = []
        self._kill_at = math.inf
        self._requested: signal.Signals | None = None
        self._told: dict[str, float] = {}  # When the launcher of each host was first told it.

    @property
    def begun(self) -> bool:
        return self._kill_at < math.inf

    @property
    def was_requested(self) -> bool:
        """Tells whether somebody told the launcher to stop, and the ranks to save."""
        return self._requested is not None

    def request(self, signum: signal.Signals, now: float, host: str = "") -> None:
        """Begins with a signal that the launcher received, or that of another host."""
        if signum not in (signal.SIGINT, signal.SIGTERM):
            self.begin(signum, now)
        elif self._requested is None:
            self._requested, self._told[host] = signum, now
            self.ask_to_save(signum, now)
        elif not self._is_same(signum, now, host):
            self.begin(signal.SIGKILL, now)

    def _is_same(self, signum: signal.Signals, now: float, host: str) -> bool:
        """Tells whether a signal is one more word of the wish that was heard already."""
        if signum != self._requested:
            return False
        is_first = host not in self._told
        told_at = self._told.setdefault(host, now)
        if signum == signal.SIGTERM:
            return self._term_counts_once or now < told_at + _SAME
        return is_first

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
