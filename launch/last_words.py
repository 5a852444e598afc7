"""The excerpt of a rank's last words that the report shows: its error, without stacks and noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .raised_error import errors_in, fatal_line, last_error, lines_without_frames
from .stderr_lines import begins_warning, is_noise

_SHOWN_LINES = 20
_FIRST_LINES = 8  # of a longer error; the rest are its last ones
_LONGEST_LINE = 500


@dataclass(frozen=True)
class Excerpt:
    """Holds what a report shows.

    Attributes:
      is_error: whether it begins with an exception; else it is the last lines, whatever they say.
      place: the script's own line that raised it, "" if that isn't known.
      lines: at most twenty and one that says how many are left out.
    """

    is_error: bool
    place: str
    lines: tuple[str, ...]


def excerpt(words: Sequence[str], by_signal: bool) -> Excerpt:
    """Chooses the lines that tell best why a rank has ended.

    Args:
      words: the last lines of its output.
      by_signal: whether a signal ended it. Then an exception was something earlier.
    """
    if by_signal:
        crash = fatal_line(words)
        if crash is not None:
            return Excerpt(True, "", _first_and_last(words[crash:]))
    else:
        error = last_error(words)
        if error is not None:
            lines = [*error.message, *_later_lines(words[error.end :])]
            return Excerpt(True, error.place, _first_and_last(lines))
    lines = [line for line in words if not is_noise(line)]
    return Excerpt(False, "", tuple(_shortened(line) for line in lines[-_SHOWN_LINES:]))


def _later_lines(words: Sequence[str]) -> list[str]:
    """Returns what a program wrote behind its error, but for warnings and errors in passing."""
    asides: set[int] = set()
    for error in errors_in(words):
        asides.update(range(error.first, error.end))
    lines = [
        line
        for number, line in enumerate(words)
        if number not in asides and not is_noise(line) and not begins_warning(line)
    ]
    return list(lines_without_frames(lines))


def _first_and_last(lines: Sequence[str]) -> tuple[str, ...]:
    left_out = len(lines) - _SHOWN_LINES
    if left_out > 0:
        middle = f"... ({left_out} lines left out)"
        lines = [*lines[:_FIRST_LINES], middle, *lines[_FIRST_LINES + left_out :]]
    return tuple(_shortened(line) for line in lines)


def _shortened(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[:_LONGEST_LINE]}... ({len(line)} characters)"
