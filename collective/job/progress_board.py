"""The progress board: shared memory in which ranks post what they do, for the launcher to read.

    rank 0 ──post──▶ ┌ page 1 ┐
    rank 1 ──post──▶ │ page 2 │ ──read──▶ launcher
                     └  ...   ┘

A rank posts in place: without a lock, input or output, in one or two microseconds. A checksum over
the whole record shows a reader that it has read half of one record and half of the next.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from collective.job.nameless_memory import PAGE, OwnedMemory, PagedMemory

VARIABLE = "COLLECTIVE_PROGRESS"  # the environment variable that holds the board's path
_FIELDS = struct.Struct("<HBxIQQ")  # length of the text, phase, pid, passed, since
_CHECKSUM = struct.Struct("<I")
_TEXT = _CHECKSUM.size + _FIELDS.size  # the text's offset in a page
_MOST_ACTIVITY_BYTES = 2000
_MOST_NAME_CHARACTERS = 1500  # names of collectives are mostly ASCII
_READ_ATTEMPTS = 100


# What a rank does while it is MEETING; it is AWAY from that until its first run.
JOINING = "joins the job"


class Phase(enum.IntEnum):
    """Says in which phase of an activity a rank is.

    From AGREEING on it takes part in an activity that needs all ranks, and may wait for them.
    """

    AWAY = 0  # takes part in nothing that the ranks share
    WORKING = 1  # works alone for all: it initialises, saves, restores or exports its part
    AGREEING = 2  # tells the others what it is about to do, and hears the same from them
    RUNNING = 3  # in a run, which begins with the same exchange
    EQUALISING = 4  # takes over rank 0's values of replicated variables
    ANSWERING = 5  # has no data left in an evaluation, and answers the others
    MEETING = 6  # waits for all ranks to join the job

    @property
    def shared(self) -> bool:
        return self >= Phase.AGREEING


class Label:
    """Describes an activity of a rank in words, made once and posted many times."""

    def __init__(self, doing: str, collectives: Sequence[str] = ()) -> None:
        """Encodes and shortens the words.

        Args:
            doing: the activity, with the names of the fetches.
            collectives: the names of its collectives.
        """
        activity = doing.replace("\n", " ").encode("utf-8", "replace")
        if len(activity) > _MOST_ACTIVITY_BYTES:
            activity = activity[:_MOST_ACTIVITY_BYTES] + b"..."
        text = activity + b"\n" + _join_names(collectives).encode("utf-8", "replace")
        self.text = text[: PAGE - _TEXT]
        self.checksum = zlib.crc32(self.text)


@dataclass(frozen=True)
class ProgressRecord:
    """Holds a rank's record.

    Attributes:
        pid: the process that posted it.
        phase: how far the rank is.
        passed: how many agreements with the other ranks it has completed. All ranks have the same
            agreements, so a rank with a smaller number is behind.
        since: when the phase began, in nanoseconds of the machine's monotonic clock.
        doing: the rank's activity; for a rank that is AWAY, its last activity.
        collectives: the names of the collectives that it takes part in, as text for messages.
    """

    pid: int
    phase: Phase
    passed: int
    since: int
    doing: str = ""
    collectives: str = ""


class Board(PagedMemory):
    """Maps the memory; the launcher and the ranks use it."""

    name, magic = "collective.progress", b"collective board 1\n"
    variable, content, loss = VARIABLE, "progress", "see this rank stall"

    def post(
        self, rank: int, record: tuple[int, Phase, int, int], label: Label, same: bool
    ) -> None:
        """Replaces the record on the page of `rank`.

        Args:
            rank: the rank whose page it is.
            record: pid, phase, passed and since, as in `ProgressRecord`.
            label: the words of the record.
            same: whether the page has that label already.
        """
        pid, phase, passed, since = record
        start = (rank + 1) * PAGE
        text_start = start + _TEXT
        fields = _FIELDS.pack(len(label.text), phase, pid, passed, since)
        if not same:
            self._memory[text_start : text_start + len(label.text)] = label.text
        checksum = zlib.crc32(fields, label.checksum)
        self._memory[start:text_start] = _CHECKSUM.pack(checksum) + fields

    def owner(self, rank: int) -> int:
        record = self.read(rank)
        return 0 if record is None else record.pid

    def read(self, rank: int) -> ProgressRecord | None:
        """Returns the record of `rank`; None if it has none, or none could be read consistently.

        Raises:
            IndexError: the board has no page for the rank.
        """
        start = (rank + 1) * PAGE
        if not PAGE <= start < len(self._memory):
            raise IndexError(f"no page for rank {rank}")
        for _ in range(_READ_ATTEMPTS):
            page = self._memory[start : start + PAGE]
            length, phase, pid, passed, since = _FIELDS.unpack_from(page, _CHECKSUM.size)
            if not pid:
                return None
            text = page[_TEXT : _TEXT + length]
            checksum = zlib.crc32(page[_CHECKSUM.size : _TEXT], zlib.crc32(text))
            if _CHECKSUM.unpack_from(page)[0] == checksum:
                doing, _, collectives = text.decode("utf-8", "replace").partition("\n")
                return ProgressRecord(pid, Phase(phase), passed, since, doing, collectives)
        return None


class LauncherBoard(OwnedMemory, Board):
    """Creates the board in the launcher."""


def _join_names(names: Sequence[str]) -> str:
    """Joins as many names as fit, and counts the others."""
    shown, room = 0, _MOST_NAME_CHARACTERS
    while shown < len(names) and len(names[shown]) + 2 <= room:
        room -= len(names[shown]) + 2
        shown += 1
    more = len(names) - shown
    if not more:
        return ", ".join(names)
    return f"{', '.join(names[:shown])} and {more} more" if shown else f"{more} collectives"
