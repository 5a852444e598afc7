"""Passes the ranks' output on: by line to the launcher's stdout and stderr, by byte to the logs.

    pipe of rank 0's stdout ──▶ RankStream ──▶ Screen (the launcher's stdout) ──▶ ThreadedWriter
    pipe of rank 1's stdout ──▶ RankStream ──┘
                                     └──────▶ rank.1/stdout

`Console` owns all of them. A *segment* is text that ends in a newline or, as progress bars do, in a
carriage return; it is shown with its own end, after the rank's number. Everything is bytes: text
that isn't UTF-8 passes unchanged.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import time
from collections.abc import Callable, Mapping
from typing import BinaryIO, Optional

from collective.launch.output.digest import JobDigest, RankDigest
from collective.launch.output.error_excerpt import tells_more
from collective.launch.output.log_patterns import LineSearch, LogPatterns
from collective.launch.output.output_tail import OutputTail
from collective.launch.output.progress_bars import ProgressBars
from collective.launch.output.stderr_lines import may_begin_noise
from collective.launch.output.threaded_writer import ThreadedWriter
from collective.launch.planning.environment import line_prefix
from collective.launch.planning.plan import LaunchPlan

_LAST_WORDS_LINES = 2000
# How many seconds a partial line is held back for its end. On a terminal somebody waits for a
# prompt or a bar; in a file it matters more that no other rank's text comes between.
_TERMINAL_PATIENCE = 0.2
_FILE_PATIENCE = 1.0
# A line that is longer than this many bytes is shown in parts.
_LONGEST_LINE = 16 << 20
_SEGMENT_END = re.compile(rb"\r\n|\r|\n")


Descriptors = tuple[int, int]
# Python 3.9 evaluates it, and has no `| None`.
Logs = tuple[Optional[BinaryIO], Optional[BinaryIO]]  # noqa: UP045


class Console:
    """Owns the launcher's ends of the ranks' pipes, and the screens that show them.

    Creating it starts threads (the writers), so the supervisor must have been forked before.

    Attributes:
        patterns: what was found in the ranks' lines; complete after `end`.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        pipes: Mapping[int, tuple[int, int]],
        logs: Mapping[int, tuple[BinaryIO | None, BinaryIO | None]],
        notify: Callable[[], None],
        loaders: Mapping[int, tuple[Descriptors, Logs]] | None = None,
    ) -> None:
        """Makes two streams for each rank, and for each loader.

        Args:
            plan: says which ranks are shown.
            pipes: the reading ends of stdout and stderr of each rank of this host; the output of
                other hosts' ranks comes through `take`.
            logs: the files that store the output.
            notify: called from a thread when there is room for more output, or no reader left.
            loaders: the same ends and files of each loader.
        """
        self._screens = _screens(notify)
        self.patterns = LogPatterns(plan.no_restart_after, plan.leave_out_host_after)
        self._digest: JobDigest | None = None
        if plan.shown_ranks and not plan.verbose:
            on_cpu = {rank: plan.devices[rank] is None for rank in sorted(plan.shown_ranks)}
            self._digest = JobDigest(self.say, on_cpu)
        self._streams: list[tuple[RankStream, RankStream]] = []
        self._of_loaders: list[tuple[RankStream, RankStream]] = []
        for rank in range(plan.size):
            prefix = line_prefix(plan, rank)
            pipe, log = pipes.get(rank, (None, None)), logs.get(rank, (None, None))
            stdout, stderr, digest = None, None, None
            if rank in plan.shown_ranks:
                stdout, stderr = self._screens
                digest = self._digest.of_rank(rank) if self._digest else None
            streams = (
                RankStream(pipe[0], prefix, stdout, log[0]),
                RankStream(pipe[1], prefix, stderr, log[1], digest),
            )
            if digest and rank != min(plan.shown_ranks):
                for stream in streams:
                    stream.leave_out_progress_bars()
            if self.patterns:
                for stream in streams:
                    stream.search(self.patterns.of_stream(rank))
            self._streams.append(streams)
        for number, (pipe, log) in (loaders or {}).items():
            shown = self._screens if plan.shown_ranks else (None, None)
            prefix = f"[loader {number}] "
            self._of_loaders.append(
                (
                    RankStream(pipe[0], prefix, shown[0], log[0]),
                    RankStream(pipe[1], prefix, shown[1], log[1]),
                )
            )
        self._watched: set[RankStream] = set()

    def say(self, text: str) -> None:
        """Writes a message from the launcher itself to stderr."""
        self._screens[-1].say(text)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Has the selector wait for the streams that may be read.

        A stream may be read while it is open and its screen has room.
        """
        readable = set()
        for stream in self._all_streams():
            if stream.readable and not stream.congested:
                readable.add(stream)
        for stream in self._watched - readable:
            selector.unregister(stream)
        for stream in readable - self._watched:
            stream.restart_patience()
            selector.register(stream, selectors.EVENT_READ, stream.read)
        self._watched = readable

    def next_flush(self) -> float:
        """Returns when (monotonic time) to show held-back text; infinity if there is none."""
        times = [stream.flush_time() for stream in self._flushed()]
        if self._digest:
            times.append(self._digest.next_time())
        return min(times, default=math.inf)

    def flush_due(self, now: float) -> None:
        """Shows text that has been held back long enough, and reports broken logs."""
        for stream in self._flushed():
            if stream.flush_time() <= now:
                stream.flush()
        if self._digest:
            self._digest.flush_due(now)
        for stream in self._all_streams():
            if stream.log_error is not None:
                self.say(
                    f"collective launch: a log can't be written: {stream.log_error}; "
                    "it ends here, the job goes on"
                )
                stream.log_error = None

    def expect_interrupts(self) -> None:
        """From now on treats interrupts of ranks as expected: they are told to stop."""
        if self._digest:
            self._digest.interrupted = True

    def expect_lost_peers(self) -> None:
        """From now on treats lost peers as expected: the report will name the cause."""
        if self._digest:
            self._digest.cause_is_known = True

    def losses(self) -> str:
        """Says where ranks lost a peer; "" if nothing was left out."""
        return self._digest.losses() if self._digest else ""

    def interruption(self) -> str:
        """Says where ranks were when they were told to stop; "" if nothing was left out."""
        return self._digest.interruption() if self._digest else ""

    def last_lines(self, rank: int) -> tuple[tuple[str, ...], str]:
        """Returns the last lines of a rank that has ended, and the name of their stream.

        They are those of its stderr or, if that explains nothing, of its stdout.
        """
        return last_lines(*self._streams[rank])

    def take(self, rank: int, is_error: bool, data: bytes) -> None:
        """Takes output of a rank on another host."""
        self._streams[rank][is_error].take(data)

    def end(self, selector: selectors.BaseSelector) -> None:
        """Takes and shows what is left in all pipes."""
        for stream in self._watched:
            selector.unregister(stream)
        self._watched = set()
        for stream in self._all_streams():
            stream.drain()
            stream.close()
        if self._digest:
            self._digest.end()

    def close(self) -> None:
        """Ends the threads: no process may be forked while they run."""
        for screen in self._screens:
            screen.writer.close()

    @property
    def congested(self) -> bool:
        """Tells whether output isn't being read, so that a rank may have to wait when it writes."""
        return any(screen.writer.congested for screen in self._screens)

    @property
    def written(self) -> bool:
        """Tells whether all output has reached its reader, or there is no reader."""
        return all(screen.writer.idle for screen in self._screens)

    @property
    def write_error(self) -> OSError | None:
        """Returns why nothing can be written any more; None while it can."""
        for screen in self._screens:
            if screen.writer.error is not None:
                return screen.writer.error
        return None

    def _all_streams(self) -> list[RankStream]:
        every = [*self._streams, *self._of_loaders]
        return [stream for streams in every for stream in streams]

    def _flushed(self) -> list[RankStream]:
        """Returns the streams whose partial lines are shown after a while."""
        remote = [stream for stream in self._all_streams() if stream.descriptor is None]
        return [*self._watched, *remote]


def last_lines(stdout: RankStream, stderr: RankStream) -> tuple[tuple[str, ...], str]:
    """Returns the last lines of a rank that has ended, and the name of their stream."""
    stdout.drain()
    stderr.drain()
    on_stdout, on_stderr = (stream.last_lines(_LAST_WORDS_LINES) for stream in (stdout, stderr))
    if tells_more(on_stdout, on_stderr):
        return tuple(on_stdout), "stdout"
    return tuple(on_stderr), "stderr" if on_stderr else ""


class RankStream:
    """Reads the launcher's end of one rank's stdout or stderr."""

    def __init__(
        self,
        descriptor: int | None,
        prefix: str,
        screen: Screen | None,
        log: BinaryIO | None,
        digest: RankDigest | None = None,
    ) -> None:
        """Takes over the descriptor and the log.

        Args:
            descriptor: the reading end of the pipe; None if the bytes come through `take`.
            prefix: the start of each line; "" passes everything on as it comes, except for a line
                that the digest may leave out.
            screen: the screen that shows the output, if any.
            log: the file that stores it, if any.
            digest: the digest through which it passes to the screen, if any.
        """
        if descriptor is not None:
            os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.open = True
        self.log_error: OSError | None = None
        self._prefix = prefix.encode()
        self._screen = screen
        self._log = log
        self._pending = bytearray()  # not shown yet: its end is missing
        self._pending_since = 0.0
        self._after_return = False
        self._tail = OutputTail()
        self._bars: ProgressBars | None = None  # set if bars are left out
        self._search: LineSearch | None = None
        self._digest = digest
        if digest is not None:
            digest.show = self._show_on_screen

    def leave_out_progress_bars(self) -> None:
        """Shows no progress bars from now on; logs keep them."""
        self._bars = ProgressBars()

    def search(self, search: LineSearch) -> None:
        """Has all lines searched from now on."""
        self._search = search

    def fileno(self) -> int:
        """Returns the pipe's descriptor."""
        assert self.descriptor is not None
        return self.descriptor

    @property
    def readable(self) -> bool:
        """Tells whether there is an open pipe to read."""
        return self.open and self.descriptor is not None

    @property
    def congested(self) -> bool:
        return self._screen is not None and self._screen.writer.congested

    def read(self) -> bool:
        """Takes one piece from the pipe. Returns whether there was one."""
        if not self.open or self.descriptor is None:
            return False  # already drained: its rank ended just before this turn of the event loop
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self.take(data)
        else:
            self.close()
        return bool(data)

    def drain(self) -> None:
        """Takes what is in the pipe now.

        It doesn't wait for the pipe's end: a child that a rank has left may hold it open.
        """
        for _ in range(64):  # 4 MB: more than a pipe holds, unless somebody goes on writing
            if not self.open or not self.read():
                return

    def close(self) -> None:
        """Shows the rest, ends the last line, and closes everything."""
        if not self.open:
            return
        self.open = False
        if self._search is not None:
            self._search.end()
        self.flush()
        if self._screen is not None and self._prefix:
            self._screen.end_line(self)
        if self.descriptor is not None:
            os.close(self.descriptor)
        if self._log is not None:
            self._log.close()

    def restart_patience(self) -> None:
        """Starts the wait for the end of a partial line again: nobody has read until now."""
        self._pending_since = time.monotonic()

    def flush_time(self) -> float:
        """Returns when (monotonic time) to show a partial line; infinity if there is none."""
        if not self._pending or self._screen is None:
            return math.inf
        patience = _TERMINAL_PATIENCE if self._screen.terminal else _FILE_PATIENCE
        return self._pending_since + patience

    def flush(self) -> None:
        """Shows the partial line."""
        self._show(len(self._pending))

    def last_lines(self, count: int) -> list[str]:
        """Returns the last lines; of a progress bar only its last state."""
        return self._tail.lines(count)

    def take(self, data: bytes) -> None:
        """Takes bytes that the rank has written."""
        if not self.open:
            return
        self._tail.take(data)
        if self._search is not None:
            self._search.take(data)
        self._write_log(data)
        if self._screen is None:
            return
        if not self._prefix and self._digest is None:
            self._show_on_screen(data)
            return
        complete = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if complete:
            complete += len(self._pending)
        # Without a prefix no other rank's text can come between: the user sees a line grow.
        if self._prefix or complete or not self._pending:
            self._pending_since = time.monotonic()
        self._pending += data
        too_long = len(self._pending) - complete > _LONGEST_LINE
        self._show(len(self._pending) if too_long else complete)
        if not self._prefix and not may_begin_noise(self._pending):
            self.flush()

    def _show(self, length: int) -> None:
        if not length or self._screen is None:
            return
        data = bytes(self._pending[:length])
        del self._pending[:length]
        if self._bars is not None:
            data = self._bars.without(data)
        if self._after_return and data.startswith(b"\n"):  # the second half of "\r\n"
            self._screen.end_line(self, after=b"\r")
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        if data and self._digest is not None:
            self._digest.take(data)
        elif data:
            self._show_on_screen(data)

    def _show_on_screen(self, data: bytes) -> None:
        if self._screen is not None:
            self._screen.show(self, data, self._prefix)

    def _write_log(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:  # a full disk ends the log, not the training
            self.log_error = error
            self._log = None


class Screen:
    """Shows segments on the launcher's stdout or stderr, which all ranks share."""

    def __init__(self, descriptor: int, notify: Callable[[], None]) -> None:
        self.terminal = os.isatty(descriptor)
        self.writer = ThreadedWriter(descriptor, notify)
        self._owner: RankStream | None = None  # the stream whose text is just before the cursor
        self._line_state = b""  # the last byte written; b"" at the start of a line

    def show(self, stream: RankStream, data: bytes, prefix: bytes) -> None:
        """Writes segments of one stream, the last perhaps without its end."""
        if not prefix:
            self._put(stream, data)
            return
        continues = self._owner is stream and self._line_state not in (b"", b"\r")
        if self._owner is not stream:
            self._end_line_of_another()
        segments = []
        start = 0
        for match in _SEGMENT_END.finditer(data):
            segments.append(data[start : match.end()])
            start = match.end()
        if start < len(data):
            segments.append(data[start:])
        text = prefix.join(segments)
        self._put(stream, text if continues else prefix + text)

    def say(self, text: str) -> None:
        """Writes lines from the launcher itself."""
        if self._line_state:
            self._put(None, b"\n")
        self._put(None, text.encode("utf-8", "surrogateescape") + b"\n")

    def end_line(self, stream: RankStream, after: bytes = b"") -> None:
        """Ends the line that `stream` has left open.

        Args:
            stream: nothing happens if another stream's line is open.
            after: b"\\r" ends a line left open after a carriage return, b"" a line left open after
                text.
        """
        after_return = self._line_state == b"\r"
        if self._owner is stream and self._line_state and after_return == (after == b"\r"):
            self._put(stream, b"\n")

    def _end_line_of_another(self) -> None:
        """Keeps two streams from sharing a line.

        In a file, text that follows a carriage return can be read where it is.
        """
        if self._line_state and (self.terminal or self._line_state != b"\r"):
            self._put(None, b"\n")

    def _put(self, stream: RankStream | None, data: bytes) -> None:
        self.writer.write(data)
        last = data[-1:]
        self._owner, self._line_state = stream, b"" if last == b"\n" else last


def _screens(notify: Callable[[], None]) -> tuple[Screen, Screen]:
    """Makes the screens of stdout and stderr.

    They share one screen if they are the same terminal, pipe or file, so that lines stay whole.
    """
    stdout = Screen(1, notify)
    same = os.path.samestat(os.fstat(1), os.fstat(2))
    return stdout, stdout if same else Screen(2, notify)
