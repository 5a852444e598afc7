"""Keeps the end of a rank's output on one stream, for the report on its failure.

Of a line of megabytes, such as the message of an error that prints an array, its beginning is kept,
and the lines before it: they have the exception's name and its traceback.
"""

from __future__ import annotations

TAIL_BYTES = 1 << 16  # at least this much is kept
_LINE_BYTES = 1 << 13  # the kept beginning of a line that is longer than the tail
_BYTES_BEFORE = 1 << 14  # and of the text before that line
_CONTINUATION = bytes(range(0x80, 0xC0))  # all bytes of a character except its first


class OutputTail:
    """Keeps the end of a stream in bounded memory."""

    def __init__(self) -> None:
        # If characters are missing, it ends within the line that `_tail` continues.
        self._head = b""
        self._missing = 0  # characters between the two
        self._tail = bytearray()

    def take(self, data: bytes) -> None:
        """Takes the next piece of the stream."""
        self._tail += data
        if len(self._tail) > 2 * TAIL_BYTES:
            cut = bytes(self._tail[:-TAIL_BYTES])
            del self._tail[:-TAIL_BYTES]
            self._leave_out(cut)

    def lines(self, count: int) -> list[str]:
        """Returns the last lines; of a progress bar only its last state.

        A line that wasn't kept completely ends in "... (5000000 characters)".
        """
        text = (self._head + self._rest()).decode("utf-8", "replace")
        text = text.replace("\r\n", "\n").rstrip()
        if not text:
            return []
        return [line.rsplit("\r", 1)[-1] for line in text.split("\n")][-count:]

    def _leave_out(self, cut: bytes) -> None:
        if self._missing and not _start_of_line(cut):
            self._missing += _characters(cut)
            return
        if self._missing:  # the long line has ended, and is no longer the last one
            cut = cut[min(cut.find(b) for b in (b"\n", b"\r") if b in cut) + 1 :]
        else:
            cut = self._head + cut
        start = _start_of_line(cut)
        self._head = cut[max(0, start - _BYTES_BEFORE) : start + _LINE_BYTES]
        self._missing = _characters(cut[start + _LINE_BYTES :])

    def _rest(self) -> bytes:
        if not self._missing:
            return bytes(self._tail)
        end, newline, later = self._tail.partition(b"\n")
        if start := _start_of_line(end):
            return bytes(end[start - 1 :]) + newline + later
        begun = self._head[_start_of_line(self._head) :]
        length = _characters(begun) + self._missing + _characters(end)
        return f"... ({length} characters)".encode() + newline + later


def _start_of_line(data: bytes) -> int:
    """Returns where the last line begins, or the last state of a progress bar; 0 for neither."""
    # A \r at the end may be that of \r\n.
    return max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1


def _characters(data: bytes) -> int:
    """Counts characters of UTF-8, even if the data begins or ends within one."""
    return len(data.translate(None, _CONTINUATION))
