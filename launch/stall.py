"""When a job stands still, and who keeps it waiting.

A rank tells the launcher (see `board`) in what it takes part that needs all ranks, and since when.
It can't tell there whether it computes or waits; the launcher sees more, because it sees all ranks
of this machine:

==================================
================================================================================
what it sees                        what it says
==================================
================================================================================
no rank is in a run                 nothing, for ever: they prepare data, or somebody debugs
a rank is in a run, another isn't   the other is missing, whatever it does by itself
all are in runs, one is behind      that one is missing: it is in a collective that the others never
come to
all are in the same run             none is missing: the run's collectives differ, or all wait for
                                    input or for another machine
a rank works for all by itself      it is missing, but may take longer: it initialises, saves,
restores or exports
==================================
================================================================================

While a rank is in a run the others can't get far without it: each can finish what they are in and
begin one thing more. So the time counts from what any of them did last. Time in which the launcher
itself was stopped, or nobody read the ranks' output so that they had to wait, doesn't count.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .board import Board, Phase, Record

EXIT_CODE = 124  # as timeout(1)
WARN_AFTER = 60.0
MORE_FOR_WORK = 6
_LOOK_EVERY = 1.0
_LATE = 5.0  # a look that is later than this comes from a launcher that was stopped

_WORDS = {
    Phase.AWAY: "in no run",
    Phase.WORKING: "at work by itself",
    Phase.AGREEING: "waiting for the others' word",
    Phase.RUNNING: "in a run",
    Phase.EQUALISING: "waiting for rank 0's values",
    Phase.ANSWERING: "answering the others' evaluation",
}


@dataclass(frozen=True)
class Stall:
    """A job that stands still.

    waited: for how many seconds, as far as they count, no rank has posted anything new.
    over: is it time to end it?
    size: of the job.
    missing: the ranks that the others wait for; none if all are in the same run.
    records: of each rank what it posted last, if anything.
    gone: the ranks that have ended: rank -> how.
    """

    waited: float
    over: bool
    size: int
    missing: tuple[int, ...]
    records: tuple[Record | None, ...]
    gone: Mapping[int, str]

    def who(self) -> str:
        if not self.missing:
            return "all ranks are in the same run"
        return f"{_named(self.missing)} of {self.size} {'is' if len(self.missing) == 1 else 'are'} missing"

    def block(self, timeout: float) -> str:
        """The report, for people."""
        if self.over:
            head = [
                f"collective.launch: the job stalled: {self.who()}",
                f"  host       {os.uname().nodename}",
            ]
            tail = [
                f"  ended      after {self.waited:.0f} s without progress (--stall-timeout "
                f"{timeout:g})"
            ]
        else:
            head = [f"collective.launch: no progress for {self.waited:.0f} s: {self.who()}"]
            tail = [
                f"  the job ends after {timeout:g} s without progress; --stall-timeout sets "
                f"it, 0 waits for ever"
            ]
        return "\n".join([*head, *self._states(), *tail, *self._advice()])

    def _states(self) -> list[str]:
        """What each rank does; ranks that do the same, together."""
        together: dict[str, list[int]] = {}
        for rank in range(self.size):
            together.setdefault(self._state(rank), []).append(rank)
        return [f"  {_named(ranks):<10} {state}" for state, ranks in together.items()]

    def _state(self, rank: int) -> str:
        record = self.records[rank]
        if rank in self.gone:
            return f"has left with {self.gone[rank]}"
        if record is None:
            return "has not come to a first run yet"
        age = max(0.0, time.monotonic() - record.since / 1e9)
        began = time.strftime("%H:%M:%S", time.localtime(time.time() - age))
        pid = f", pid {record.pid}" if rank in self.missing else ""
        which = ": " if record.phase != Phase.AWAY else "; last: "
        lines = [f"{_WORDS[record.phase]} since {began} ({age:.0f} s{pid}){which}{record.doing}"]
        if record.collectives and record.phase.shared:
            lines.append(f"{'':13}with {record.collectives}")
        return "\n".join(lines)

    def _advice(self) -> list[str]:
        stuck = [rank for rank in range(self.size) if rank not in self.gone and self._behind(rank)]
        if stuck:
            return [
                f"  Others have finished what {_named(stuck)} "
                f"{'is' if len(stuck) == 1 else 'are'} still in. "
                "A lookup in a branch of tf.cond that not all ranks take waits for ever."
            ]
        if self.missing:
            return [
                "  All ranks must run the same. If one only needs longer, so does --stall-timeout."
            ]
        return [
            "  A branch of tf.cond with a lookup isn't taken by all of them, or input doesn't "
            "come, or a rank of "
            "another machine is missing, or the run takes longer than --stall-timeout."
        ]

    def _behind(self, rank: int) -> bool:
        """Is it in something that another rank has finished?"""
        mine = self.records[rank]
        front = max((record.passed for record in self.records if record is not None), default=0)
        return mine is not None and mine.phase.shared and mine.passed < front


class Watch:
    """Sees whether the ranks go on. Times are seconds of any clock that only goes forward."""

    def __init__(self, size: int, timeout: float, now: float):
        """
        Args:
          size: how many ranks there are.
          timeout: after how many seconds a job that stands still is to end; with 0 nobody looks.
          now: the time.
        """
        self.timeout = timeout
        self._interval = min(_LOOK_EVERY, timeout / 8)
        self._looked = now
        self._lost = 0.0
        self._size = size
        self._records: list[Record | None] = [None] * size
        self._changed = now
        self._worked = now
        self._warned: set[object] = set()

    def next_look(self) -> float:
        return self._looked + self._interval if self.timeout and self._size > 1 else math.inf

    def look(
        self, now: float, records: Sequence[Record | None], gone: Mapping[int, str], held: bool
    ) -> Stall | None:
        """A stall that is to be told of: one to warn of, once for each kind, or one that ends the
        job.

        Args:
          now: the time.
          records: of each rank what it has posted.
          gone: the ranks that have ended: rank -> how.
          held: whether the ranks may have to wait for the launcher, which hasn't read their output.
        """
        if held or now - self._looked > self._interval + _LATE:
            self._lost += now - self._looked
        self._looked = now
        clock = now - self._lost
        for rank, record in enumerate(records):
            if record is not None and record != self._records[rank]:
                self._records[rank], self._changed = record, clock
        here = {
            rank: record
            for rank, record in enumerate(self._records)
            if record is not None and rank not in gone
        }
        phases = {record.phase for record in here.values()}
        waited = clock - self._changed
        if Phase.WORKING in phases and waited < (MORE_FOR_WORK - 1) * self.timeout:
            self._worked = clock
        if not any(phase.shared for phase in phases):
            return None
        over = clock - max(self._changed, self._worked) >= self.timeout
        stall = self._stall(waited, over, gone)
        kind = tuple((rank, here[rank].phase if rank in here else None) for rank in stall.missing)
        if over or waited >= WARN_AFTER and kind not in self._warned:
            self._warned.add(kind)
            return stall
        return None

    def _stall(self, waited: float, over: bool, gone: Mapping[int, str]) -> Stall:
        stall = Stall(waited, over, self._size, (), tuple(self._records), gone)
        ranks, records = range(self._size), self._records
        absent = [
            r
            for r in ranks
            if r in gone or (record := records[r]) is None or not record.phase.shared
        ]
        return replace(
            stall, missing=tuple(absent or [rank for rank in ranks if stall._behind(rank)])
        )


def posted(board: Board, size: int) -> list[Record | None]:
    """What each rank has posted; one whose process has ended is in no run."""

    def of(rank: int) -> Record | None:
        record = board.read(rank)
        dead = record is not None and not os.path.exists(f"/proc/{record.pid}")
        return replace(record, phase=Phase.AWAY) if record is not None and dead else record

    return [of(rank) for rank in range(size)]


def _named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2-4"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
