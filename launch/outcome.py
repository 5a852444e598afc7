"""The outcome of a job: how each rank ended, which one is the root cause, and the failure report.

The rank that failed first isn't always the first to be gone. A rank that raises shuts Horovod down
on its way out; a peer that waits in a collective gets an error from that, and may well be dead
before the root cause has finished its own clean-up. Such a *victim* says so in its last words. It
is not blamed while another rank may still turn out to be the root cause.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass

# For how many seconds after its first victim the root cause may take to end.
CAUSE_DELAY = 3.0
_LOST_A_PEER = re.compile(
    r"Horovod has been shut down|HorovodInternalError|gloo/transport/"
    r"|RankError: (A rank failed|.* failed on rank \d)"
)
_SHOWN_LINES = 20
_LONGEST_LINE = 500


@dataclass(frozen=True)
class RankExit:
    """Describes how one rank ended.

    Attributes:
      rank, pid: which process; pid is 0 if it couldn't be started.
      code: the exit code, or minus the signal.
      time: in seconds since the epoch.
      requested: whether the launcher had told it to stop.
      last_words: its last lines, more than are shown: TensorFlow explains an error at length.
      last_words_from: "stderr" or "stdout".
    """

    rank: int
    pid: int
    code: int
    time: float
    requested: bool = False
    last_words: tuple[str, ...] = ()
    last_words_from: str = "stderr"

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def is_victim(self) -> bool:
        """Tells whether the rank says itself that it failed because of another."""
        return self.failed and any(_LOST_A_PEER.search(line) for line in self.last_words)

    @property
    def shell_code(self) -> int:
        """Returns the code as a shell reports it: 128 + signal."""
        return self.code if self.code >= 0 else 128 - self.code

    def manner(self) -> str:
        """Returns "exit code 3" or "signal SIGKILL (9, ...)"."""
        if self.code >= 0:
            return f"exit code {self.code}"
        hint = ""
        if self.code == -signal.SIGKILL:
            hint = ", often sent by the kernel when memory runs out"
        return f"signal {_signal_name(-self.code)} ({-self.code}{hint})"


class JobOutcome:
    """Collects the ranks' ends in the order in which they came."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.exits: list[RankExit] = []

    def add(self, rank_exit: RankExit) -> None:
        self.exits.append(rank_exit)

    @property
    def any_running(self) -> bool:
        return len(self.exits) < self._size

    def running_text(self) -> str:
        """Names the ranks that still run, for people: "ranks 0 and 2"."""
        ended = {rank_exit.rank for rank_exit in self.exits}
        running = [str(rank) for rank in range(self._size) if rank not in ended]
        if not running:
            return "what the ranks left behind"
        if len(running) == 1:
            return f"rank {running[0]}"
        return f"ranks {', '.join(running[:-1])} and {running[-1]}"

    def root_cause(self) -> RankExit | None:
        """Returns the first rank that failed unasked; a victim only if there is nobody else."""
        failed = [end for end in self.exits if end.failed and not end.requested]
        for rank_exit in failed:
            if not rank_exit.is_victim:
                return rank_exit
        return failed[0] if failed else None

    def cause_is_certain(self) -> bool:
        """Tells whether there is a root cause that no later end can change."""
        cause = self.root_cause()
        if cause is None:
            return False
        return not cause.is_victim or bool(self._early_leavers()) or not self.any_running

    def failure_report(self) -> str:
        """Returns the report on the root cause, for people; "" if there is none."""
        cause = self.root_cause()
        if cause is None:
            return ""
        lines = [
            f"collective.launch: the job failed; root cause: rank {cause.rank} of {self._size}",
            f"  time       {_clock_time(cause.time)}",
            f"  host       {os.uname().nodename}",
            f"  pid        {cause.pid or 'none: it could not be started'}",
            f"  ended by   {cause.manner()}",
        ]
        for leaver in self._early_leavers():
            lines.append(
                f"  left early rank {leaver.rank} (pid {leaver.pid}) with exit code 0 at "
                f"{_clock_time(leaver.time)}, while others still worked"
            )
        others = [end for end in self.exits if end is not cause and end.failed]
        if others:
            others.sort(key=lambda end: end.rank)
            lines.append(f"  then ended {', '.join(_short_reason(end) for end in others)}")
        if cause.last_words:
            lines.append(f"  last lines of its {cause.last_words_from}:")
            lines += [f"    {_shortened(line)}" for line in cause.last_words[-_SHOWN_LINES:]]
        else:
            lines.append("  it wrote nothing")
        return "\n".join(lines)

    def _early_leavers(self) -> list[RankExit]:
        """Returns the ranks that ended with 0, unasked, in a job that then failed."""
        return [end for end in self.exits if not end.failed and not end.requested]


def _short_reason(end: RankExit) -> str:
    manner = end.manner() if end.code >= 0 else _signal_name(-end.code)
    return f"rank {end.rank} by {manner}" + (" after the launcher's TERM" if end.requested else "")


def _clock_time(seconds: float) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{clock}.{int(seconds % 1 * 1000):03d}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"SIGRT{signum}"


def _shortened(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[:_LONGEST_LINE]}... ({len(line)} characters)"
