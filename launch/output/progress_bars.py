"""Leaves out the progress bars of all ranks but the first: they all show the same progress.

A bar redraws itself after a carriage return. tqdm's and Keras's bars end with a newline; then their
last state is left out, too. Other text that follows a bar in its line is shown.
"""

from __future__ import annotations

import re

_SEGMENT = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_LAST_STATE = re.compile(
    # tqdm:  "train:  50%|#####     | 5/10 [00:01<00:01,  4.9it/s, loss=0.5]"
    rb"[^|\r\n]*\d+%\|[^|\r\n]*\| *\d[^|\r\n]*\[[^\]\r\n]*\]\s*"
    # Keras: "64/2000 [>.............] - ETA: 3s - loss: 0.5"
    rb"|[\x08\s]*\d+/(?:\d+|Unknown) \[[=>.]*\](?!.*Traceback)[^\r\n]*\s*"
)


class ProgressBars:
    """Leaves the progress bars out of one stream."""

    def __init__(self) -> None:
        self._after_return = False  # the next text takes the place of a bar
        self._undecided = b""  # ends with a carriage return, which a newline may follow

    def without(self, data: bytes) -> bytes:
        """Returns a piece of output without the bars."""
        data, self._undecided = self._undecided + data, b""
        shown = bytearray()
        for match in _SEGMENT.finditer(data):
            segment = match[0]
            if segment.endswith(b"\r"):
                if match.end() == len(data):
                    self._undecided = segment
                else:
                    self._after_return = True
            elif not segment.endswith(b"\n"):
                if not self._after_return:
                    shown += segment
            else:
                if not (self._after_return and _LAST_STATE.fullmatch(segment)):
                    shown += segment
                self._after_return = False
        return bytes(shown)
