"""What became of the ranks, why the job ended, and what the launcher says about it.

The rank that failed first isn't always the first to be gone. A rank that raises shuts Horovod down
on its way out; a peer that waits in a collective gets an error from that, and may well be dead
before the culprit has finished its own clean-up. Such a *victim* says so in its last words. It is
not blamed while another rank may still turn out to be the culprit.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass

# For how long a culprit may take to die after its first victim.
SETTLING = 3.0
_LOST_A_PEER = re.compile(
    r"Horovod has been shut down|HorovodInternalError|gloo/transport/|RankError: (A rank failed|.* failed on rank \d)"
)
_SHOWN_LINES = 20
_LONGEST_LINE = 500


@dataclass(frozen=True)
class Exit:
    """How one rank ended."""

    rank: int
    pid: int
    code: int  # exit code, or minus the signal
    at: float  # seconds since the epoch
    asked: bool = False  # after the launcher had told it to stop
    # more lines than are shown: TensorFlow explains an error at length
    last_words: tuple[str, ...] = ()
    last_words_from: str = "stderr"

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def victim(self) -> bool:
        """Does it say itself that it failed because of another?"""
        return self.failed and any(_LOST_A_PEER.search(line) for line in self.last_words)

    @property
    def shell_code(self) -> int:
        """As a shell reports it: 128 + signal."""
        return self.code if self.code >= 0 else 128 - self.code

    def manner(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        name = _signal_name(-self.code)
        hint = (
            ", often sent by the kernel when memory runs out"
            if self.code == -signal.SIGKILL
            else ""
        )
        return f"signal {name} ({-self.code}{hint})"


class Fate:
    """The ranks' ends in the order in which they came."""

    def __init__(self, size: int):
        self._size = size
        self.exits: list[Exit] = []

    def add(self, ended: Exit) -> None:
        self.exits.append(ended)

    @property
    def living(self) -> int:
        return self._size - len(self.exits)

    def living_text(self) -> str:
        """The ranks that live, for people: "ranks 0 and 2"."""
        gone = {ended.rank for ended in self.exits}
        living = [str(rank) for rank in range(self._size) if rank not in gone]
        if len(living) < 2:
            return f"rank {living[0]}" if living else "what the ranks left behind"
        return f"ranks {', '.join(living[:-1])} and {living[-1]}"

    def cause(self) -> Exit | None:
        """The rank to blame: the first that failed unasked, a victim only if there is nobody else."""
        failed = [ended for ended in self.exits if ended.failed and not ended.asked]
        return next((ended for ended in failed if not ended.victim), failed[0] if failed else None)

    def left_early(self) -> list[Exit]:
        """The ranks that had ended with 0, unasked, in a job that then failed."""
        return [ended for ended in self.exits if not ended.failed and not ended.asked]

    def settled(self) -> bool:
        """Is it known who is to blame?"""
        cause = self.cause()
        return cause is not None and (
            not cause.victim or bool(self.left_early()) or not self.living
        )

    def block(self) -> str:
        """The report on the rank to blame, for people."""
        cause = self.cause()
        if cause is None:
            return ""
        lines = [
            f"collective.launch: the job failed; root cause: rank {cause.rank} of {self._size}",
            f"  time       {_clock(cause.at)}",
            f"  host       {os.uname().nodename}",
            f"  pid        {cause.pid or 'none: it could not be started'}",
            f"  ended by   {cause.manner()}",
        ]
        for leaver in self.left_early():
            lines.append(
                f"  left early rank {leaver.rank} (pid {leaver.pid}) with exit code 0 at "
                f"{_clock(leaver.at)}, "
                "while others still worked"
            )
        lines += self._others(cause)
        if cause.last_words:
            lines.append(f"  last lines of its {cause.last_words_from}:")
            lines += [f"    {_shortened(line)}" for line in cause.last_words[-_SHOWN_LINES:]]
        else:
            lines.append("  it wrote nothing")
        return "\n".join(lines)

    def _others(self, cause: Exit) -> list[str]:
        others = sorted(
            (ended for ended in self.exits if ended is not cause and ended.failed),
            key=lambda e: e.rank,
        )
        if not others:
            return []
        reasons = [
            f"rank {ended.rank} by "
            f"{ended.manner() if ended.code >= 0 else _signal_name(-ended.code)}"
            + (" after the launcher's TERM" if ended.asked else "")
            for ended in others
        ]
        return ["  then ended " + ", ".join(reasons)]


def _clock(at: float) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03d}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"SIGRT{signum}"


def _shortened(line: str) -> str:
    return (
        line
        if len(line) <= _LONGEST_LINE
        else f"{line[:_LONGEST_LINE]}... ({len(line)} characters)"
    )
