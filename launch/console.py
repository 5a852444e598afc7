"""All streams of a job, the two screens they are shown on, and the event loop's view of them."""

from __future__ import annotations

import math
import os
import selectors
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from .environment import prefix
from .output import Screen, Stream
from .plan import Plan
from .usage import UsageError

KINDS = ("stdout", "stderr")
_TAIL_LINES = 200


class Console:
    """Owns the launcher's ends of the ranks' pipes.

    Creating it starts threads (the writers), so the keeper must be there already.
    """

    def __init__(
        self,
        plan: Plan,
        ends: Sequence[Sequence[int]],
        logs: Sequence[Sequence[BinaryIO | None]],
        notify: Callable[[], None],
    ):
        """
        Args:
          plan: which ranks are shown.
          ends: of each rank the reading ends of its stdout and stderr.
          logs: the files to go with them.
          notify: called from a thread when there is room for more output, or nobody to read it.
        """
        self._screens = _screens(notify)
        self._streams = [
            tuple(
                Stream(end, prefix(rank, plan.size), screen if rank in plan.shown else None, log)
                for end, screen, log in zip(ends[rank], self._screens, logs[rank])
            )
            for rank in range(plan.size)
        ]
        self._watched: set[Stream] = set()

    def say(self, text: str) -> None:
        """A message of the launcher's own, on stderr."""
        self._screens[-1].say(text)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Has the selector wait for the streams that may be read: open, and with room where they
        are shown.
        """
        wanted = {
            stream
            for pair in self._streams
            for stream in pair
            if stream.open and not stream.congested
        }
        for stream in self._watched - wanted:
            selector.unregister(stream.descriptor)
        for stream in wanted - self._watched:
            stream.touch()
            selector.register(stream.descriptor, selectors.EVENT_READ, stream.read)
        self._watched = wanted

    def next_flush(self) -> float:
        """When (monotonic time) a partial line is to be shown; infinity if there is none."""
        return min((stream.flush_due() for stream in self._watched), default=math.inf)

    def flush_due(self, now: float) -> None:
        """Shows the partial lines that have waited long enough, and tells of a log that can't be
        written.
        """
        for stream in self._watched:
            if stream.flush_due() <= now:
                stream.flush()
        for pair in self._streams:
            for stream in pair:
                if stream.log_error is not None:
                    self.say(
                        f"collective.launch: a log ends here, it can't be written: "
                        f"{stream.log_error}"
                    )
                    stream.log_error = None

    def last_words(self, rank: int) -> tuple[tuple[str, ...], str]:
        """The last lines that a rank, which has ended, wrote to its stderr, else stdout, and which
        it was.
        """
        for stream in self._streams[rank]:
            stream.drain()
        for kind, stream in reversed(list(zip(KINDS, self._streams[rank]))):
            lines = stream.tail(_TAIL_LINES)
            if lines:
                return tuple(lines), kind
        return (), ""

    def end(self, selector: selectors.BaseSelector) -> None:
        """Takes and shows what is left in the pipes."""
        for stream in self._watched:
            selector.unregister(stream.descriptor)
        self._watched = set()
        for pair in self._streams:
            for stream in pair:
                stream.drain()
                stream.close()

    @property
    def congested(self) -> bool:
        """Is there output that isn't read, so that who writes more may have to wait?"""
        return any(screen.writer.congested for screen in self._screens)

    @property
    def written(self) -> bool:
        """Has everything reached its reader, or none to reach?"""
        return all(screen.writer.idle for screen in self._screens)

    @property
    def broken(self) -> OSError | None:
        """Why nothing can be written any more."""
        return next(
            (screen.writer.broken for screen in self._screens if screen.writer.broken), None
        )


def open_logs(plan: Plan) -> list[tuple[BinaryIO | None, BinaryIO | None]]:
    """Of each rank the files that keep its stdout and stderr.

    Raises:
      UsageError: they can't be written.
    """
    if plan.log_dir is None:
        return [(None, None)] * plan.size
    logs: list[tuple[BinaryIO | None, BinaryIO | None]] = []
    try:
        for rank in range(plan.size):
            folder = Path(plan.log_dir, f"rank.{rank}")
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: who follows the file sees what the rank wrote, when it wrote it.
            out, err = (open(folder / kind, "wb", buffering=0) for kind in KINDS)
            logs.append((out, err))
    except OSError as error:
        raise UsageError(f"--log-dir {plan.log_dir} can't be written: {error}") from None
    return logs


def _screens(notify: Callable[[], None]) -> tuple[Screen, Screen]:
    """The launcher's stdout and stderr: one screen if they are one terminal, pipe or file, so that
    lines stay whole.
    """
    stdout = Screen(1, notify)
    one = os.path.samestat(os.fstat(1), os.fstat(2))
    return stdout, stdout if one else Screen(2, notify)
