"""The excerpt of a rank's last output that the report shows: its error, without stacks and noise.

A handled error isn't the reason why a rank ended. After an uncaught error Python ends with code 1,
and writes little after it; with another code the error must be the last thing written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from collective.launch.output.raised_error import (
    RaisedError,
    errors_in,
    fatal_line,
    last_error,
    lines_without_frames,
)
from collective.launch.output.stderr_lines import (
    begins_warning,
    continues_warning,
    is_noise,
    lost_a_peer,
)

_SHOWN_LINES = 20
_FIRST_LINES = 8  # of a longer error; its last lines fill the rest
_LONGEST_LINE = 500
_ALREADY_SHORTENED = re.compile(r"\.\.\. \((\d+) characters\)$")  # by output_tail.py
UNCAUGHT = 1  # Python's exit code
# The lines after an uncaught exception's own line: its message, and output on the way out.
_MOST_LATER_LINES = 50


@dataclass(frozen=True)
class Excerpt:
    """Holds the lines that a report shows.

    Attributes:
        is_error: whether it begins with an exception; else it is simply the last lines.
        place: the line of the script that raised the exception, "" if it isn't known.
        lines: at most twenty, and one that says how many are left out.
    """

    is_error: bool
    place: str
    lines: tuple[str, ...]


def tells_more(stdout: Sequence[str], stderr: Sequence[str]) -> bool:
    """Tells whether stdout, and not stderr, explains why a process has ended.

    Stderr explains it, unless it has nothing but noise, or nothing but warnings while stdout has an
    error: a script's log handler may write there.
    """
    if not stdout or all(map(is_noise, stderr)):
        return bool(stdout)
    before = ""
    for line in stderr:
        is_warning = begins_warning(line) or (before and continues_warning(line, before))
        if not is_warning and not is_noise(line):
            return False
        before = line if is_warning else ""
    return last_error(stdout) is not None or any(map(lost_a_peer, stdout))


def ending_error(words: Sequence[str], code: int) -> RaisedError | None:
    """Returns the error that ended a process, if its last output shows one.

    Args:
        words: the last lines of its output.
        code: its exit code, or minus the signal.
    """
    error = last_error(words) if code > 0 else None
    if error is None:
        return None
    later = [line for line in _later_lines(words[error.own + 1 :]) if line[0] not in " \t"]
    return error if len(later) <= (_MOST_LATER_LINES if code == UNCAUGHT else 0) else None


def excerpt(words: Sequence[str], code: int) -> Excerpt:
    """Chooses the lines that best explain why a rank has ended.

    Args:
        words: the last lines of its output.
        code: its exit code, or minus the signal. An exception before a signal was an earlier event.
    """
    if code < 0:
        crash = fatal_line(words)
        if crash is not None:
            return Excerpt(True, "", _first_and_last(words[crash:]))
    else:
        error = ending_error(words, code)
        if error is not None:
            lines = [*error.message, *_later_lines(words[error.end :])]
            return Excerpt(True, error.place, _first_and_last(lines))
    lines = [line for line in words if not is_noise(line)]
    if code > 0 and last_error(words) is not None:
        lines = list(lines_without_frames(lines))  # else a long stack may fill the excerpt
    return Excerpt(False, "", tuple(_shortened(line) for line in lines[-_SHOWN_LINES:]))


def _later_lines(words: Sequence[str]) -> list[str]:
    """Returns the output after a program's error, without warnings and errors in passing."""
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
    already = _ALREADY_SHORTENED.search(line)
    length = already[1] if already else len(line)
    return f"{line[:_LONGEST_LINE]}... ({length} characters)"
