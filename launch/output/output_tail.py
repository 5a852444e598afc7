"""The end of what a rank has written to a stream, for the report on its failure.

A line of megabytes, as the message of an error that prints an array, keeps its beginning and the
lines before it: the exception's name stands there, and its traceback.
"""

from __future__ import annotations

TAIL_BYTES = 1 << 16  # at least so much is kept
_LINE_BYTES = 1 << 13  # of a line that is longer than the tail, so much of its beginning
_BYTES_BEFORE = 1 << 14  # and so much of what stands before it
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a character but its first


class OutputTail:
    """Keeps the end of a stream in bounded memory."""

    def __init__(self) -> None:
        # It ends within the line that `_tail` goes on with, if characters are missing.
        self._head = b""
        self._missing = 0  # characters between the two
        self._tail = bytearray()

    def take(self, data: bytes) -> None:
        """Takes what the stream goes on with."""
        self._tail += data
        if len(self._tail) > 2 * TAIL_BYTES:
            cut = bytes(self._tail[:-TAIL_BYTES])
            del self._tail[:-TAIL_BYTES]
            self._leave_out(cut)

    def lines(self, count: int) -> list[str]:
        """Returns the last lines, of a progress bar only its last state.

        A line that wasn't kept whole ends in "... (5000000 characters)".
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
        if self._missing:  # the long line has ended, and isn't the last one any more
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
        if anew := _start_of_line(end):
            return bytes(end[anew - 1 :]) + newline + later
        begun = self._head[_start_of_line(self._head) :]
        length = _characters(begun) + self._missing + _characters(end)
        return f"... ({length} characters)".encode() + newline + later


def _start_of_line(data: bytes) -> int:
    """Returns where the last line begins, or the last state of a progress bar; 0 for neither."""
    # A \r at the end may be that of \r\n.
    return max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1


def _characters(data: bytes) -> int:
    """Counts characters of UTF-8, also where the data begins or ends within one."""
    return len(data.translate(None, _CONTINUATION))
