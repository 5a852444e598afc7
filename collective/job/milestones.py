"""The milestones of ranks: each rank's progress and its last checkpoint, in shared memory.

    rank 0 ──post──▶ ┌ page 1 ┐
    rank 1 ──post──▶ │ page 2 │ ──read──▶ launcher, once the job has failed or was told to stop
                     └  ...   ┘
    ranks ◀──read─── [ page 0 ] ◀──mark── launcher, as it ends the job

They tell the launcher from which step a restart continues, and whether a job makes progress. A rank
counts its training runs in place, in less than a microsecond. The memory has no name in any folder,
like that of the progress board.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

from collective.job.nameless_memory import PAGE, OwnedMemory, PagedMemory

VARIABLE = "COLLECTIVE_MILESTONES"  # the environment variable that holds the board's path
_ENDING = 64  # the offset of the launcher's mark in page 0
_STEPS = struct.Struct("<Q")
_FIELDS = struct.Struct("<HxxIQQ")  # length of the path, pid, start, step
_CHECKSUM = struct.Struct("<I")
_RECORD = _STEPS.size + _CHECKSUM.size  # the offset of the fields in a page
_PATH = _RECORD + _FIELDS.size
_READ_ATTEMPTS = 100


@dataclass(frozen=True)
class Milestones:
    """Says how far a rank has come.

    Attributes:
        pid: the process; 0 if it has posted nothing.
        steps: how many training runs it has completed.
        start: the global step at which it began: from the checkpoint that it restored, else 0.
        checkpoint: the path of the checkpoint that it saved or restored last, if any.
        step: that checkpoint's global step.
    """

    pid: int = 0
    steps: int = 0
    start: int = 0
    checkpoint: str = ""
    step: int = 0

    @property
    def last_step(self) -> int:
        """Returns the global step that it completed last, if each run counts one step."""
        return max(self.start + self.steps, self.step)


class MilestoneBoard(PagedMemory):
    """Maps the memory; the launcher and the ranks use it."""

    name, magic = "collective.milestones", b"collective milestones 1\n"
    variable, content, loss = VARIABLE, "milestones", "know this rank's steps"

    @property
    def is_ending(self) -> bool:
        """Tells whether the launcher is ending the job: a signal then doesn't ask for a save."""
        return self._memory[_ENDING] != 0

    def post_steps(self, rank: int, steps: int) -> None:
        """Replaces the number of training runs of `rank`."""
        _STEPS.pack_into(self._memory, (rank + 1) * PAGE, steps)

    def post(self, rank: int, milestones: Milestones) -> None:
        """Replaces the whole record of `rank`. A path that is too long loses its beginning."""
        path = os.fsencode(milestones.checkpoint)[-(PAGE - _PATH) :]
        fields = _FIELDS.pack(len(path), milestones.pid, milestones.start, milestones.step)
        start = (rank + 1) * PAGE
        checksum = _CHECKSUM.pack(zlib.crc32(fields + path))
        self._memory[start + _STEPS.size : start + _PATH + len(path)] = checksum + fields + path
        self.post_steps(rank, milestones.steps)

    def owner(self, rank: int) -> int:
        return self.read(rank).pid

    def read(self, rank: int) -> Milestones:
        """Returns what `rank` has posted; empty if it could not be read consistently.

        Raises:
            IndexError: the board has no page for the rank.
        """
        start = (rank + 1) * PAGE
        if not PAGE <= start < len(self._memory):
            raise IndexError(f"no page for rank {rank}")
        for _ in range(_READ_ATTEMPTS):
            page = self._memory[start : start + PAGE]
            length, pid, first, step = _FIELDS.unpack_from(page, _RECORD)
            (checksum,) = _CHECKSUM.unpack_from(page, _STEPS.size)
            if not pid:
                break
            if checksum == zlib.crc32(page[_RECORD : _PATH + length]):
                path = os.fsdecode(page[_PATH : _PATH + length])
                return Milestones(pid, _STEPS.unpack_from(page)[0], first, path, step)
        return Milestones()


class LauncherMilestones(OwnedMemory, MilestoneBoard):
    """Creates the board in the launcher."""

    def mark_ending(self) -> None:
        """Tells the ranks that the job ends: from now on a signal doesn't ask them to save."""
        self._memory[_ENDING] = 1
