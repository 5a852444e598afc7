"""The outcome of a job: how each rank ended, which one is the root cause, and the failure report.

The first rank to fail isn't always the first to end. A rank that raises an error shuts Horovod down
on its way out; a peer that waits in a collective gets an error from that, and may end before the
root cause has finished its own clean-up. Such a *victim* says so in its last output. It isn't
blamed while another rank may still turn out to be the root cause. A root cause that takes longer is
told to stop, and ends by that signal: it is blamed if a victim has named it and it had raised an
error.

The root cause may report lost peers, too: they die of its error while it cleans up. So only a rank
whose output ends with a lost peer, and says nothing else, is certainly a victim. A rank that has
raised its own error is blamed before such a victim, and after a rank that doesn't mention peers.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from collective.launch.output.error_excerpt import UNCAUGHT, ending_error, excerpt
from collective.launch.output.raised_error import (
    RaisedError,
    lines_without_frames,
    tells_of_other_versions,
    tells_of_shared_files,
)
from collective.launch.output.stderr_lines import (
    is_horovods,
    is_log_line,
    lost_a_peer,
    lost_rank,
    message_lost_a_peer,
)
from collective.launch.planning.rank_names import rank_names

# How many seconds after its first victim the root cause may take to end.
CAUSE_DELAY = 3.0
# The exit codes of ranks that were told to stop, by Ctrl-C or TERM.
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# Up to this many ranks are named one by one.
_FEW_RANKS = 3
# This file is in the stack of every script that `--as` runs.
_RUNS_SCRIPTS = "collective/run_script.py"
# How many of the last lines, without stacks, are searched for a lost peer.
_VICTIM_LINES = 200


@dataclass(frozen=True)
class RankExit:
    """Describes how one rank ended.

    Attributes:
        rank, pid: the process; pid is 0 if it couldn't be started.
        code: the exit code, or minus the signal.
        time: in seconds since the epoch.
        requested: whether the launcher told it to stop.
        last_lines: its last lines, more than are shown: TensorFlow's errors are long.
        last_lines_from: "stderr" or "stdout".
        host: the name of its host, "" for the launcher's.
        lost_by: why its host counts as lost, "" for a rank that ended by itself.
        was_ending: whether it had raised an error and was told to stop while it ended; `code` is
            then the error's code.
    """

    rank: int
    pid: int
    code: int
    time: float
    requested: bool = False
    last_lines: tuple[str, ...] = ()
    last_lines_from: str = "stderr"
    host: str = ""
    lost_by: str = ""
    was_ending: bool = False

    @property
    def failed(self) -> bool:
        return self.code != 0

    @functools.cached_property
    def error(self) -> RaisedError | None:
        """Returns the error that ended the rank, if its output shows one."""
        return ending_error(self.last_lines, self.code)

    @functools.cached_property
    def victim_certainty(self) -> int:
        """Tells how certain the rank's own output makes it that another rank caused its failure.

        0: it doesn't mention lost peers. 1: it does, but its first error was a different one.
        2: as far as it says, it failed only because of lost peers.
        """
        if not self.failed:
            return 0
        if self.error is None:
            # Horovod's threads write at any time: about peers that ended before this rank, or
            # after.
            spoken = [line for line in self._words_on_peers() if not is_horovods(line)]
            is_certain = any(map(lost_a_peer, spoken))
        else:
            is_certain = message_lost_a_peer(self.error.messages[0])
        return 2 if is_certain else int(any(map(lost_a_peer, self._words_on_peers())))

    @property
    def is_victim(self) -> bool:
        """Tells whether the rank itself says that it failed because of another."""
        return self.victim_certainty > 0

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Returns the ranks that it reports as lost, as far as it names them."""
        found = map(lost_rank, self._words_on_peers()) if self.failed else ()
        return frozenset(rank for rank in found if rank is not None)

    def _words_on_peers(self) -> list[str]:
        words = self.last_lines
        error: list[str] = []
        if self.error:
            error = [*self.error.chain, *self.error.message]
            # Horovod's threads, and others, report peers that have died of this rank's error.
            before = [line for line in words[: self.error.end] if not is_horovods(line)]
            after = [line for line in words[self.error.end :] if not is_log_line(line)]
            words = (*before, *after)
        return error + list(lines_without_frames(words))[-_VICTIM_LINES:]

    def as_failure(self) -> RankExit:
        """Returns the end that the rank's error would have led to without the launcher's TERM."""
        if self.code == UNCAUGHT:
            failure = replace(self, requested=False)
        elif self.code < 0:
            failure = replace(self, requested=False, was_ending=True, code=UNCAUGHT)
        else:
            return self
        return failure if failure.error and failure.victim_certainty < 2 else self

    @property
    def shell_code(self) -> int:
        """Returns the code as a shell reports it: 128 + signal."""
        return self.code if self.code >= 0 else 128 - self.code

    def manner(self) -> str:
        """Returns "exit code 3" or "signal SIGKILL (9, ...)"."""
        if self.lost_by:
            return "the loss of its host"
        if self.was_ending:
            return "an error; the launcher's TERM came before it was gone"
        if self.code >= 0:
            return f"exit code {self.code}"
        hint = ""
        if self.code == -signal.SIGKILL:
            hint = ", often sent by the kernel when memory runs out"
        return f"signal {_signal_name(-self.code)} ({-self.code}{hint})"


class JobOutcome:
    """Collects the ranks' ends in the order in which they are reported."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.exits: list[RankExit] = []

    def add(self, rank_exit: RankExit) -> None:
        if rank_exit.requested and any(rank_exit.rank in end.lost_ranks for end in self.exits):
            rank_exit = rank_exit.as_failure()
        self.exits.append(rank_exit)

    @property
    def any_running(self) -> bool:
        return len(self.exits) < self._size

    def running_text(self) -> str:
        """Names the ranks that still run, for messages: "ranks 0 and 2"."""
        ended = {rank_exit.rank for rank_exit in self.exits}
        running = [rank for rank in range(self._size) if rank not in ended]
        if not running:
            return "what the ranks left behind"
        if 1 < len(running) <= _FEW_RANKS:
            *first, last = map(str, running)
            return f"ranks {', '.join(first)} and {last}"
        return rank_names(running)

    def root_cause(self) -> RankExit | None:
        """Returns the first rank that failed unasked; a victim only if there is no other."""
        failed = [end for end in self.exits if end.failed and not end.requested]
        return min(failed, key=lambda end: end.victim_certainty, default=None)

    @property
    def is_preempted(self) -> bool:
        """Tells whether the root cause was told to stop rather than failed."""
        cause = self.root_cause()
        return cause is not None and cause.shell_code in _STOPPED

    @property
    def left_preempted(self) -> bool:
        """Tells whether all ranks have ended by themselves, with the code of preempted ranks."""
        return all(end.code in (0, *_STOPPED) for end in self.exits) and any(
            end.code in _STOPPED for end in self.exits
        )

    def cause_is_certain(self) -> bool:
        """Tells whether there is a root cause that no later end can change."""
        cause = self.root_cause()
        if cause is None:
            return False
        return not cause.is_victim or bool(self._early_leavers()) or not self.any_running

    def failure_report(self) -> str:
        """Returns the report on the root cause as text; "" if there is no root cause."""
        cause = self.root_cause()
        if cause is None:
            return ""
        if cause.lost_by:
            return "\n".join(self._loss_of_host(cause))
        lines = [
            f"collective launch: the job failed; root cause: rank {cause.rank} of {self._size}",
            f"  time       {_clock_time(cause.time)}",
            f"  host       {cause.host or os.uname().nodename}",
            f"  pid        {cause.pid or 'none: it could not be started'}",
            f"  ended by   {cause.manner()}",
        ]
        lines += _leaver_lines(self._early_leavers())
        others = [end for end in self.exits if end is not cause and end.failed]
        if others:
            lines.append(f"  then ended {_reasons(others)}")
        return "\n".join([*lines, *self._last_words(cause)])

    def _loss_of_host(self, cause: RankExit) -> list[str]:
        lost = [end for end in self.exits if end.lost_by and end.host == cause.host]
        names = rank_names(sorted(end.rank for end in lost))
        others = [end for end in self.exits if end.failed and end not in lost]
        lines = loss_report(
            f"host {cause.host} ({names} of {self._size})", cause.lost_by, cause.time
        )
        if others:
            lines.append(f"  then ended {_reasons(others)}")
        return lines

    def _last_words(self, cause: RankExit) -> list[str]:
        if not cause.last_lines:
            return ["  it wrote nothing"]
        shown = excerpt(cause.last_lines, cause.code)
        lines = []
        if shown.place:
            lines.append(f"  raised at  {shown.place}")
        if cause.error:
            alike = [
                end.rank
                for end in self.exits
                if end.error and end.error.identity == cause.error.identity
            ]
            if len(alike) > 1:
                lines.append(f"  raised by  {rank_names(sorted(alike))} alike")
            if len(alike) < self._size and tells_of_shared_files(cause.error):
                lines.append(
                    "  perhaps    another rank has just made, moved or removed the same, as every "
                    "rank runs the script: let one do it, by `if strategy.rank() == 0:`"
                )
            is_as_it_is = any(_RUNS_SCRIPTS in line for line in cause.last_lines)
            if is_as_it_is and tells_of_other_versions(cause.error):
                lines.append(
                    "  meant for  other versions than Python "
                    f"{sys.version_info[0]}.{sys.version_info[1]} and TensorFlow 2.15, which raise "
                    "the same without this library: fix the script"
                )
            if cause.error.lacks_horovod:
                lines.append(
                    "  to fix     Horovod isn't built for this TensorFlow: `collective "
                    "build-horovod`, or run a script of one host by `collective launch --as "
                    "horovod`"
                )
        kind = "error on" if shown.is_error else "last lines of"
        lines.append(f"  {kind} its {cause.last_lines_from}:")
        return lines + [f"    {line}" for line in shown.lines]

    def _early_leavers(self) -> list[RankExit]:
        """Returns the ranks that ended with 0, unasked, in a job that failed later."""
        return [end for end in self.exits if not end.failed and not end.requested]


def loss_report(host: str, lost_by: str, when: float) -> list[str]:
    """Returns the first lines of the report on the loss of a host.

    Args:
        host: the host's name and ranks.
        lost_by: why it counts as lost.
        when: in seconds since the epoch.
    """
    return [
        f"collective launch: the job failed; root cause: {host} was lost",
        f"  time       {_clock_time(when)}",
        f"  lost by    {lost_by}",
    ]


def _leaver_lines(leavers: list[RankExit]) -> list[str]:
    if len(leavers) > _FEW_RANKS:
        first = leavers[0]
        names = rank_names(sorted(end.rank for end in leavers))
        return [
            f"  left early {names} with exit code 0 while others still worked, first rank "
            f"{first.rank} (pid {first.pid}) at {_clock_time(first.time)}"
        ]
    return [
        f"  left early rank {end.rank} (pid {end.pid}) with exit code 0 at "
        f"{_clock_time(end.time)}, while others still worked"
        for end in leavers
    ]


def _reasons(ends: Iterable[RankExit]) -> str:
    """Returns "rank 0 by exit code 4, ranks 2-5 by SIGTERM after the launcher's TERM"."""
    ranks_by_reason: dict[str, list[int]] = {}
    for end in sorted(ends, key=lambda end: end.rank):
        reason = end.manner() if end.code >= 0 else _signal_name(-end.code)
        if end.requested:
            reason += " after the launcher's TERM"
        ranks_by_reason.setdefault(reason, []).append(end.rank)
    parts = [f"{rank_names(ranks)} by {reason}" for reason, ranks in ranks_by_reason.items()]
    return ", ".join(parts)


def _clock_time(seconds: float) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{clock}.{int(seconds % 1 * 1000):03d}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"SIGRT{signum}"
