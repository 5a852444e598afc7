"""The stall detector: notices that a job has stalled, and which rank keeps it waiting.

A rank posts on the progress board which operation of all ranks it takes part in, and since when.
The board doesn't show whether the rank computes or waits; the launcher can tell because it sees all
ranks:

    no rank is in a run                 Nothing is reported, for ever: they prepare data, or
                                        somebody debugs.
    a rank waits for all to join        The others are missing; they have ten minutes at least, to
                                        prepare data. One that has left will never come: the job
                                        ends at once.
    a rank is in a run, another isn't   The other is missing, whatever it does by itself.
    all are in runs, one is behind      That one is missing: it is in a collective that the others
                                        never come to.
    all are in the same run             None is missing: the run's collectives differ, or all wait
                                        for input.
    a rank works for all by itself      It is missing, but may take longer: it initialises, saves,
                                        restores or exports.
    on GPUs, a rank is in a run that none   It may take longer, too: the GPU's driver compiles
    has finished yet                        TensorFlow's kernels at their first use, for GPUs that
                                            are newer than TensorFlow.

While a rank is in a run, the others can't get far without it: each can finish its current run and
begin one more. So the time counts from the last change of any rank. It doesn't count while the
launcher itself was stopped, or while nobody read the ranks' output so that they had to wait.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from collective.job.progress_board import JOINING, Board, Phase, ProgressRecord
from collective.launch.planning.rank_names import rank_names

EXIT_CODE = 124  # as timeout(1)
WARN_AFTER = 60.0  # seconds without progress
WORK_FACTOR = 6  # how many timeouts a rank that works for all, or compiles, may take
_LONGEST_INTERVAL = 1.0
MEETING_TIME = 600.0  # seconds that ranks wait at least until all have joined the job
_SETTLED = 5.0  # after so many seconds all records of ranks that have left are there
_LATE = 5.0  # a check that is later than this means that the launcher was stopped

_PHASE_TEXTS = {
    Phase.AWAY: "in no run",
    Phase.WORKING: "at work by itself",
    Phase.AGREEING: "waiting for the others' word",
    Phase.RUNNING: "in a run",
    Phase.EQUALISING: "waiting for rank 0's values",
    Phase.ANSWERING: "answering the others' evaluation",
    Phase.MEETING: "waiting for all ranks to join",
}


@dataclass(frozen=True)
class Stall:
    """Describes a stalled job.

    Attributes:
        waited: how many seconds, as far as they count, no rank has posted anything new.
        expired: whether it is time to end the job.
        records: the last record of each rank, if it has posted any.
        exited: how each rank that has ended did so.
        missing: the ranks that the others wait for; none if all are in the same run.
        compiling: whether a rank may be compiling TensorFlow's kernels.
        never: whether a rank has left without having joined the job.
        stacks: the Python stacks of missing ranks, innermost frame first, if they have answered.
    """

    waited: float
    expired: bool
    records: tuple[ProgressRecord | None, ...]
    exited: Mapping[int, str]
    missing: tuple[int, ...]
    compiling: bool = False
    never: bool = False
    stacks: Mapping[int, Sequence[str]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.records)

    def summary(self) -> str:
        """Names the missing ranks."""
        if not self.missing:
            return "all ranks are in the same run"
        are = "is" if len(self.missing) == 1 else "are"
        return f"{rank_names(self.missing)} of {self.size} {are} missing"

    def report(self, timeout: float) -> str:
        """Returns the warning, or the report on the end of the job, as text."""
        is_meeting = any(r is not None and r.phase == Phase.MEETING for r in self.records)
        is_joining = is_meeting and timeout < MEETING_TIME
        set_by = "--stall-timeout sets it"
        if is_joining:
            timeout, set_by = MEETING_TIME, "while ranks join, only a longer --stall-timeout counts"
        if self.expired:
            head = [
                f"collective launch: the job stalled: {self.summary()}",
                f"  host       {os.uname().nodename}",
            ]
            limit = "while ranks join" if is_joining else "--stall-timeout"
            tail = f"  ended      after {self.waited:.0f} s without progress ({limit} {timeout:g})"
            if self.never:
                tail = "  ended      because a rank has left that the others wait for"
        else:
            head = [f"collective launch: no progress for {self.waited:.0f} s: {self.summary()}"]
            tail = (
                f"  the job ends after {timeout:g} s without progress; {set_by}, 0 waits for ever"
            )
        return "\n".join([*head, *self._states(), tail, self._advice()])

    def _states(self) -> list[str]:
        """Describes each rank; ranks that do the same share a line."""
        ranks_by_state: dict[str, list[int]] = {}
        for rank in range(self.size):
            ranks_by_state.setdefault(self._state(rank), []).append(rank)
        return [f"  {rank_names(ranks):<10} {state}" for state, ranks in ranks_by_state.items()]

    def _state(self, rank: int) -> str:
        record = self.records[rank]
        if rank in self.exited:
            return f"has left with {self.exited[rank]}"
        at = "".join(f"\n{'':13}at {place}" for place in self.stacks.get(rank, ()))
        if record is None or (record.phase, record.doing) == (Phase.AWAY, JOINING):
            return f"has not come to a first run yet{at}"
        age = max(0.0, time.monotonic() - record.since / 1e9)
        began = time.strftime("%H:%M:%S", time.localtime(time.time() - age))
        pid = f", pid {record.pid}" if rank in self.missing else ""
        colon = "; last: " if record.phase == Phase.AWAY else ": "
        phase = f"{_PHASE_TEXTS[record.phase]} since {began} ({age:.0f} s{pid})"
        state = f"{phase}{colon}{record.doing}"
        if record.collectives and record.phase.shared:
            state += f"\n{'':13}with {record.collectives}"
        return state + at

    def _advice(self) -> str:
        stuck = [
            rank
            for rank, record in enumerate(self.records)
            if rank not in self.exited and _is_behind(record, self.records)
        ]
        if stuck:
            return (
                f"  Others have finished what {rank_names(stuck)} "
                f"{'is' if len(stuck) == 1 else 'are'} still in. "
                "A lookup in a turn of a loop that not all ranks take waits for ever."
            )
        if self.compiling:
            return (
                "  A run of this kind is the first: the GPU's driver may be compiling TensorFlow's "
                "kernels. It does\n  so once, for minutes, if CUDA_CACHE_PATH (~/.nv) can be "
                f"written. It has {WORK_FACTOR} timeouts."
            )
        if self.never:
            return "  All ranks must make a CollectiveStrategy before any of them ends."
        if self.missing:
            return (
                "  All ranks must run the same. If one only needs longer, so does --stall-timeout."
            )
        return (
            "  A branch or a turn of a loop, with a lookup, isn't taken by all of them, or "
            "input doesn't come, or the run takes longer than --stall-timeout."
        )


class StallDetector:
    """Watches the records of the ranks. Times are seconds of any clock that only goes forward."""

    def __init__(self, size: int, timeout: float, now: float, on_gpus: bool = False) -> None:
        """Starts to count the time.

        Args:
            size: how many ranks there are.
            timeout: after how many seconds without progress the job ends; 0 turns the check off.
            now: the time.
            on_gpus: whether a run that is the first of its kind may compile kernels.
        """
        self.timeout = timeout
        self._on_gpus = on_gpus
        self._finished: set[str] = set()  # descriptions of kinds of runs
        self._interval = min(_LONGEST_INTERVAL, timeout / 8)
        self._last_check = now
        self._excluded = 0.0  # seconds that don't count
        self._records: list[ProgressRecord | None] = [None] * size
        self._last_change = now
        self._last_work = now  # when a rank was last allowed to be at work
        self._warned: set[object] = set()

    def next_check(self) -> float:
        """Returns when to call `check` next; infinity if never."""
        if not self.timeout or len(self._records) < 2:
            return math.inf
        return self._last_check + self._interval

    def check(
        self,
        now: float,
        records: Sequence[ProgressRecord | None],
        exited: Mapping[int, str],
        output_congested: bool,
    ) -> Stall | None:
        """Returns a stall: once per kind as a warning, or one that ends the job; None for neither.

        Args:
            now: the time.
            records: the record of each rank, None if it couldn't be read.
            exited: how each rank that has ended did so.
            output_congested: whether ranks may have to wait because nobody reads their output.
        """
        if output_congested or now - self._last_check > self._interval + _LATE:
            self._excluded += now - self._last_check
        self._last_check = now
        clock = now - self._excluded
        for rank, record in enumerate(records):
            before = self._records[rank]
            if record is not None and record != before:
                if before is not None and before.phase == Phase.RUNNING:
                    self._finished.add(before.doing)
                self._records[rank] = record
                self._last_change = clock
        phases = {
            rank: record.phase
            for rank, record in enumerate(self._records)
            if record is not None and rank not in exited
        }
        waited = clock - self._last_change
        compiling = self._on_gpus and any(
            phases.get(rank) == Phase.RUNNING and record.doing not in self._finished
            for rank, record in enumerate(self._records)
            if record is not None
        )
        at_work = compiling or Phase.WORKING in phases.values()
        if at_work and waited < (WORK_FACTOR - 1) * self.timeout:
            self._last_work = clock
        shared = {phase for phase in phases.values() if phase.shared}
        if not shared:
            return None
        meeting = shared == {Phase.MEETING}
        timeout = max(self.timeout, MEETING_TIME) if meeting else self.timeout
        never = meeting and waited >= min(_SETTLED, timeout)
        never = never and any(self._records[rank] is None for rank in exited)
        expired = never or clock - max(self._last_change, self._last_work) >= timeout
        missing = _missing_ranks(self._records, exited)
        kind = tuple((rank, phases.get(rank)) for rank in missing)
        if not expired and (waited < WARN_AFTER or kind in self._warned):
            return None
        self._warned.add(kind)
        return Stall(waited, expired, tuple(self._records), exited, missing, compiling, never)


def read_records(board: Board, size: int) -> list[ProgressRecord | None]:
    """Reads the record of each rank; one whose process has ended is in no run."""
    records: list[ProgressRecord | None] = []
    for rank in range(size):
        record = board.read(rank)
        if record is not None and not os.path.exists(f"/proc/{record.pid}"):
            record = replace(record, phase=Phase.AWAY)
        records.append(record)
    return records


def _missing_ranks(
    records: Sequence[ProgressRecord | None], exited: Mapping[int, str]
) -> tuple[int, ...]:
    """Returns the ranks that are in no run; if all are in one, those that are behind."""
    absent, behind = [], []
    for rank, record in enumerate(records):
        if rank in exited or record is None or not record.phase.shared:
            absent.append(rank)
        elif _is_behind(record, records):
            behind.append(rank)
    return tuple(absent or behind)


def _is_behind(record: ProgressRecord | None, records: Sequence[ProgressRecord | None]) -> bool:
    """Tells whether a rank is in something that another rank has finished."""
    front = max((other.passed for other in records if other is not None), default=0)
    return record is not None and record.phase.shared and record.passed < front
