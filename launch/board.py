"""Where ranks post what they do, and the launcher reads it: memory that both have mapped, a page
for each rank.

    rank 0 ──post──▶ ┌ page 1 ┐
    rank 1 ──post──▶ │ page 2 │ ──read──▶ launcher
                     └  ...   ┘

A rank posts in place: no lock, no input or output, one or two microseconds. A checksum over the
whole record tells a reader that saw half of one record and half of the next. The memory has no name
in any folder: ranks open it by way of the launcher's descriptor in /proc, and it is gone with the
last process that has it, however that ends. (A mapped file on a disk would also make a rank wait,
at times, while the kernel writes it back.)
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "COLLECTIVE_PROGRESS"
_MAGIC = b"collective board 1\n"
_PAGE = 4096
_FIELDS = struct.Struct("<HBxIQQ")  # length of the text, phase, pid, passed, since
_CHECKSUM = struct.Struct("<I")
_TEXT = _CHECKSUM.size + _FIELDS.size  # where it begins
_LONGEST_DOING = 2000  # bytes, and characters of names, which are mostly ASCII
_LONGEST_NAMES = 1500
_TRIES = 100


class Phase(enum.IntEnum):
    """What a rank does. From AGREEING on it takes part in something that needs all ranks, and may
    wait for them.
    """

    AWAY = 0  # in nothing that the ranks share
    WORKING = 1  # on its own, for all: it initialises, saves, restores or exports its part
    AGREEING = 2  # tells the others what it is about to do, and hears what they are
    RUNNING = 3  # in a run, which begins with the same
    EQUALISING = 4  # takes over rank 0's values of replicated variables
    ANSWERING = 5  # has no data left in an evaluation, and answers the others

    @property
    def shared(self) -> bool:
        return self >= Phase.AGREEING


class Label:
    """What a rank does, in words, made once and posted many times."""

    def __init__(self, doing: str, collectives: Sequence[str] = ()):
        """
        Args:
          doing: in words, with the names of the fetches.
          collectives: the names of those that it takes part in.
        """
        words = doing.replace("\n", " ").encode("utf-8", "replace")
        words = words if len(words) <= _LONGEST_DOING else words[:_LONGEST_DOING] + b"..."
        self.text = (words + b"\n" + _listed(collectives).encode("utf-8", "replace"))[
            : _PAGE - _TEXT
        ]
        self.checksum = zlib.crc32(self.text)


@dataclass(frozen=True)
class Record:
    """What a rank has posted.

    pid: of the process that posted it.
    passed: how many agreements with the other ranks are behind it. They are the same ones on every
      rank, so a smaller number is a rank that is behind.
    since: when the phase began, in nanoseconds of the machine's monotonic clock.
    doing: what it does; of a rank that is AWAY what it did last.
    collectives: the names of those that it takes part in, for people.
    """

    pid: int
    phase: Phase
    passed: int
    since: int
    doing: str = ""
    collectives: str = ""


class Board:
    """The memory, on either side."""

    def __init__(self, descriptor: int):
        """Maps an open file; closing it afterwards is the caller's affair.

        Raises:
          ValueError: the file is no board.
          OSError: it can't be mapped.
        """
        self._memory = mmap.mmap(descriptor, 0)
        if self._memory[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is no board of a launcher")

    @classmethod
    def open(cls, place: str) -> Board:
        """The launcher's, by its `OwnBoard.place`.

        Raises:
          OSError, ValueError: there is none.
        """
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)

    def post(
        self, rank: int, record: tuple[int, Phase, int, int], label: Label, same: bool
    ) -> None:
        """Replaces what stands on the page of `rank`.

        Args:
          record: pid, phase, passed and since, as in `Record`.
          label: the rest of it.
          same: whether the label is the one that stands there already.
        """
        pid, phase, passed, since = record
        at = (rank + 1) * _PAGE
        fields = _FIELDS.pack(len(label.text), phase, pid, passed, since)
        if not same:
            self._memory[at + _TEXT : at + _TEXT + len(label.text)] = label.text
        self._memory[at : at + _TEXT] = _CHECKSUM.pack(zlib.crc32(fields, label.checksum)) + fields

    def read(self, rank: int) -> Record | None:
        """What `rank` has posted; None if that is nothing, or nothing whole.

        Raises:
          IndexError: the board has no page for it.
        """
        at = (rank + 1) * _PAGE
        if not _PAGE <= at < len(self._memory):
            raise IndexError(f"no page for rank {rank}")
        for _ in range(_TRIES):
            page = self._memory[at : at + _PAGE]
            length, phase, pid, passed, since = _FIELDS.unpack_from(page, _CHECKSUM.size)
            if not pid:
                return None
            text = page[_TEXT : _TEXT + length]
            if _CHECKSUM.unpack_from(page)[0] == zlib.crc32(
                page[_CHECKSUM.size : _TEXT], zlib.crc32(text)
            ):
                doing, _, collectives = text.decode("utf-8", "replace").partition("\n")
                return Record(pid, Phase(phase), passed, since, doing, collectives)
        return None


class OwnBoard(Board):
    """The launcher's.

    Attributes:
      place: by what path the ranks open it.
    """

    def __init__(self, size: int):
        """Makes room for `size` ranks.

        Raises:
          OSError: there is no memory, or no descriptor left.
        """
        self._descriptor = _nameless_file()
        os.ftruncate(self._descriptor, (size + 1) * _PAGE)
        os.pwrite(self._descriptor, _MAGIC, 0)
        self.place = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        super().__init__(self._descriptor)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):  # not where Python was built for a C library before 2.27
        return os.memfd_create("collective.progress")
    with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        return os.dup(file.fileno())


def _listed(names: Sequence[str]) -> str:
    """As many of them as there is room for."""
    shown, room = 0, _LONGEST_NAMES
    while shown < len(names) and len(names[shown]) + 2 <= room:
        room -= len(names[shown]) + 2
        shown += 1
    more = len(names) - shown
    return ", ".join(names[:shown]) + (
        f" and {more} more" if shown else f"{more} collectives"
    ) * bool(more)
