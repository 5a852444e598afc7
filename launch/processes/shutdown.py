"""The shutdown of a job: which signal the ranks get now, and when a harsher one follows.

    started by              signals, with the time between them
    ----------------------  -------------------------------------------------------
    a failed rank           TERM, grace, KILL
    TERM to the launcher    TERM, time to save, KILL
    INT                     INT, time to save, TERM, grace, KILL
    HUP, QUIT               the same signal, grace, TERM, grace, KILL
    a second INT or TERM    KILL

A later start never delays a KILL that was due earlier. One request may arrive more than once: srun
or mpirun passes Ctrl-C on to the launchers of all hosts, and a scheduler may send TERM to a process
twice at the same moment. Such signals count once. Two presses of Ctrl-C count twice. Slurm sends
TERM in several ways, seconds apart when it is busy, and then sends KILL itself: there, all TERMs
count as one.
"""

from __future__ import annotations

import math
import signal

# Two TERMs to one launcher within this many seconds count as one.
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
            term_counts_once: whether repeated TERMs count once: their sender itself kills the job
                later.
        """
        self._term_counts_once = term_counts_once
        self._grace = grace
        self._time_to_save = grace if time_to_save is None else time_to_save
        self._steps: list[tuple[float, signal.Signals]] = []
        self._kill_at = math.inf
        self._requested: signal.Signals | None = None
        self._told: dict[str, float] = {}  # when each host's launcher first received the signal

    @property
    def begun(self) -> bool:
        return self._kill_at < math.inf

    @property
    def was_requested(self) -> bool:
        """Tells whether the launcher was asked to stop, and the ranks to save."""
        return self._requested is not None

    def request(self, signum: signal.Signals, now: float, host: str = "") -> None:
        """Starts with a signal that this launcher, or another host's launcher, received."""
        if signum not in (signal.SIGINT, signal.SIGTERM):
            self.begin(signum, now)
        elif self._requested is None:
            self._requested, self._told[host] = signum, now
            self.ask_to_save(signum, now)
        elif not self._is_same(signum, now, host):
            self.begin(signal.SIGKILL, now)

    def _is_same(self, signum: signal.Signals, now: float, host: str) -> bool:
        """Tells whether a signal repeats a request that was received already."""
        if signum != self._requested:
            return False
        is_first = host not in self._told
        told_at = self._told.setdefault(host, now)
        if signum == signal.SIGTERM:
            return self._term_counts_once or now < told_at + _SAME
        return is_first

    def ask_to_save(self, signum: signal.Signals, now: float) -> None:
        """Starts with `signum` at once, and gives the ranks time to save."""
        self._begin(signum, now, self._time_to_save)

    def begin(self, signum: signal.Signals, now: float) -> None:
        """Starts with `signum` at once."""
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
        """Returns when even KILL has had enough time."""
        return self._kill_at + patience
