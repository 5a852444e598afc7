"""Tells whether the jobs of this container make progress: exit code 0, or 1 and who is missing.

The ranks of a job post what they do on a board in the launcher's memory (`progress_board`). A job
is unhealthy when a rank is in a run, and no rank has posted anything for a minute; the launcher
warns of that, too, and ends the job after --stall-timeout. A job of one rank waits for nobody, and
a container without a job (a shell, TensorBoard) is healthy.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from collective.job.progress_board import VARIABLE, Board, Phase, ProgressRecord
from collective.launch.progress.stall_detector import WARN_AFTER, read_records

_SIZE_VARIABLE = "LOCAL_WORLD_SIZE"
_MOST_RANKS = 20  # as many are named


def main(proc: Path = Path("/proc")) -> int:
    now = time.monotonic()
    complaints = [complaint(records, now) for records in records_of_jobs(proc)]
    for text in filter(None, complaints):
        print(text)
    return 1 if any(complaints) else 0


def records_of_jobs(proc: Path) -> list[Sequence[ProgressRecord | None]]:
    """Reads the boards that processes have in their environment, each board once."""
    sizes: dict[str, int] = {}
    for file in proc.glob("[0-9]*/environ"):
        try:
            variables = file.read_bytes().split(b"\0")
        except OSError:
            continue  # the process has ended, or is another user's
        values = dict(os.fsdecode(line).partition("=")[::2] for line in variables)
        if values.get(VARIABLE) and values.get(_SIZE_VARIABLE, "").isdigit():
            sizes[values[VARIABLE]] = int(values[_SIZE_VARIABLE])
    jobs: list[Sequence[ProgressRecord | None]] = []
    for path, size in sizes.items():
        try:
            jobs.append(read_records(Board.open(path), size))
        except (OSError, ValueError):
            continue  # the job has ended
    return jobs


def complaint(records: Sequence[ProgressRecord | None], now: float) -> str:
    """Says for how long a job has stood still, and which ranks are in no run; "" if it moves.

    Args:
        records: the record of each rank.
        now: the time, in seconds of the machine's monotonic clock.
    """
    posted = [record for record in records if record is not None]
    if not any(record.phase.shared for record in posted):
        return ""
    if any(record.phase == Phase.WORKING for record in posted):
        return ""  # it initialises, saves, restores or exports, which may take long
    waited = now - max(record.since for record in posted) / 1e9
    if waited < WARN_AFTER:
        return ""
    missing = [
        str(rank)
        for rank, record in enumerate(records)
        if record is None or not record.phase.shared
    ]
    if not missing:
        return f"no progress for {waited:.0f} s: all {len(records)} ranks are in a run"
    more = f" and {len(missing) - _MOST_RANKS} more" if len(missing) > _MOST_RANKS else ""
    return (
        f"no progress for {waited:.0f} s: of {len(records)} ranks, these are in no run: "
        f"{', '.join(missing[:_MOST_RANKS])}{more}"
    )


if __name__ == "__main__":
    sys.exit(main())
