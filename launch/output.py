"""The ranks' output: line by line to the launcher's own stdout and stderr, byte by byte to the
logs.

    pipe of rank 0's stdout ──▶ Stream ──▶ Screen (the launcher's stdout) ──▶ Writer
    pipe of rank 1's stdout ──▶ Stream ──┘
                                  └─────▶ rank.1/stdout

A *segment* is what ends in a newline or, as progress bars do, in a carriage return; it is shown
with its end as it is and the rank before it. Everything is bytes: what isn't UTF-8 passes
untouched.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from typing import BinaryIO

from .writer import Writer

# A partial line is held back for so long, hoping for its end. On a terminal somebody waits for a
# prompt or a bar; in a file it matters more that nothing of another rank comes between.
_PATIENCE_TERMINAL = 0.2
_PATIENCE_FILE = 1.0
# A "line" longer than this is shown in parts.
_LONGEST = 16 << 20
_TAIL = 1 << 16
_END = re.compile(rb"\r\n|\r|\n")


class Screen:
    """The launcher's stdout or stderr, which all ranks share. If both are one file, they are one
    screen.
    """

    def __init__(self, descriptor: int, notify: Callable[[], None]):
        self.terminal = os.isatty(descriptor)
        self.writer = Writer(descriptor, notify)
        self._owner: Stream | None = None  # whose text the cursor stands behind
        # b"\r" after a carriage return, b"" at the start of a line, else something
        self._open = b""

    def show(self, stream: Stream, data: bytes, prefix: bytes) -> None:
        """Writes segments of one stream, the last perhaps without its end."""
        if not prefix:
            self._put(stream, data)
            return
        continues = self._owner is stream and self._open not in (b"", b"\r")
        if self._owner is not stream:
            self._make_room()
        ends = [match.end() for match in _END.finditer(data)]
        starts = [0, *ends]
        pieces = [data[start:end] for start, end in zip(starts, [*ends, len(data)]) if start < end]
        shown = prefix.join([b"", *pieces])
        self._put(stream, shown[len(prefix) :] if continues else shown)

    def say(self, text: str) -> None:
        """Writes lines of the launcher's own."""
        if self._open:
            self._put(None, b"\n")
        self._put(None, text.encode("utf-8", "surrogateescape") + b"\n")

    def _make_room(self) -> None:
        """No two streams share a line. In a file what follows a carriage return is legible where it
        stands.
        """
        if self._open and (self.terminal or self._open != b"\r"):
            self._put(None, b"\n")

    def end_line(self, stream: Stream, after: bytes = b"") -> None:
        """Ends the line that `stream` has left open: behind a carriage return (`after`), or behind
        anything else.
        """
        if self._owner is stream and self._open and (self._open == b"\r") == (after == b"\r"):
            self._put(stream, b"\n")

    def _put(self, stream: Stream | None, data: bytes) -> None:
        self.writer.write(data)
        last = data[-1:]
        self._owner, self._open = stream, b"" if last == b"\n" else last


class Stream:
    """The launcher's end of one rank's stdout or stderr."""

    def __init__(self, descriptor: int, prefix: str, screen: Screen | None, log: BinaryIO | None):
        """
        Args:
          descriptor: the reading end of its pipe.
          prefix: what stands before each line; "" passes everything on as it comes.
          screen: where it is shown, if at all.
          log: where it is kept, if at all.
        """
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.open = True
        self.log_error: OSError | None = None
        self._prefix = prefix.encode()
        self._screen = screen
        self._log = log
        self._pending = bytearray()  # not shown yet, for want of its end
        self._since = 0.0
        self._after_return = False
        self._tail = bytearray()

    @property
    def congested(self) -> bool:
        return self._screen is not None and self._screen.writer.congested

    def read(self) -> bool:
        """Takes what is in the pipe, at most one piece of it. Returns whether there was something."""
        if not self.open:  # drained when its rank ended, just before its turn in the event loop
            return False
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._take(data)
        else:
            self.close()
        return bool(data)

    def drain(self) -> None:
        """Takes what is in the pipe now. Doesn't wait for its end: a process that a rank left
        behind may hold it.
        """
        for _ in range(64):  # 4 MB: more than a pipe holds, unless somebody goes on writing
            if not self.open or not self.read():
                return

    def close(self) -> None:
        """Shows what is left, ends the last line and closes everything."""
        if not self.open:
            return
        self.open = False
        self.flush()
        if self._screen is not None and self._prefix:
            self._screen.end_line(self)
        os.close(self.descriptor)
        if self._log is not None:
            self._log.close()

    def touch(self) -> None:
        """Begins the wait for the end of a partial line anew: until now nobody read."""
        self._since = time.monotonic()

    def flush_due(self) -> float:
        """When (monotonic time) to show a partial line, infinity if there is none."""
        if not self._pending or self._screen is None:
            return math.inf
        return self._since + (_PATIENCE_TERMINAL if self._screen.terminal else _PATIENCE_FILE)

    def flush(self) -> None:
        """Shows the partial line."""
        self._show(len(self._pending))

    def tail(self, lines: int) -> list[str]:
        """The last lines, of a progress bar only its last state."""
        text = self._tail.decode("utf-8", "replace").replace("\r\n", "\n").rstrip()
        return [line.rsplit("\r", 1)[-1] for line in text.split("\n")][-lines:] if text else []

    def _take(self, data: bytes) -> None:
        self._tail += data
        if len(self._tail) > 2 * _TAIL:
            del self._tail[:-_TAIL]
        self._keep(data)
        if self._screen is None:
            return
        if not self._prefix:
            self._screen.show(self, data, b"")
            return
        complete = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        complete += len(self._pending) if complete else 0
        self._pending += data
        self._since = time.monotonic()
        self._show(len(self._pending) if len(self._pending) - complete > _LONGEST else complete)

    def _show(self, length: int) -> None:
        if not length or self._screen is None:
            return
        data = bytes(self._pending[:length])
        del self._pending[:length]
        if self._after_return and data.startswith(b"\n"):  # the second half of "\r\n"
            self._screen.end_line(self, after=b"\r")
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        if data:
            self._screen.show(self, data, self._prefix)

    def _keep(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:  # a full disk ends the log, not the training
            self.log_error = error
            self._log = None
