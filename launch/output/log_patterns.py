"""Finds lines of ranks after which a failed job isn't started again, or not on that host.

    --no-restart-after 'CUDA out of memory'             the same would come again
    --leave-out-host-after 'uncorrectable ECC error'    that host would fail again

Every line of stdout and stderr is searched, shown or not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from collective.job.errors import UsageError

_LONGEST_LINE = 1 << 14  # bytes that are searched; the rest of a longer line isn't
_MOST_SHOWN = 120  # characters of a line in a report
_END = re.compile(rb"[\r\n]+")


@dataclass(frozen=True)
class Match:
    """Describes the first line of a rank in which a pattern was found.

    Attributes:
        rank: the rank.
        pattern: the regular expression.
        line: the line.
        leaves_out_host: whether the restart leaves out the rank's host; else there is none.
    """

    rank: int
    pattern: str
    line: str
    leaves_out_host: bool

    def __str__(self) -> str:
        """Says what was found, and which option asks for it."""
        option = "--leave-out-host-after" if self.leaves_out_host else "--no-restart-after"
        line = self.line if len(self.line) <= _MOST_SHOWN else f"{self.line[:_MOST_SHOWN]}…"
        return f"rank {self.rank} wrote '{line}' ({option} '{self.pattern}')"


class LogPatterns:
    """Holds the patterns of a job, and what was found in one attempt.

    Attributes:
        matches: one for each rank and pattern at most.
    """

    def __init__(self, no_restart_after: Sequence[str], leave_out_host_after: Sequence[str]):
        self._patterns = [
            (re.compile(text), is_about_host)
            for texts, is_about_host in ((no_restart_after, False), (leave_out_host_after, True))
            for text in texts
        ]
        self.matches: list[Match] = []

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def of_stream(self, rank: int) -> LineSearch:
        """Returns the search in one stream of a rank."""
        return LineSearch(self, rank)

    def search(self, rank: int, line: str) -> None:
        """Notes the patterns that are in a line."""
        for pattern, leaves_out_host in self._patterns:
            if pattern.search(line):
                match = Match(rank, pattern.pattern, line.strip(), leaves_out_host)
                if not any((m.rank, m.pattern) == (rank, match.pattern) for m in self.matches):
                    self.matches.append(match)


class LineSearch:
    """Splits a stream into lines, and searches them."""

    def __init__(self, patterns: LogPatterns, rank: int):
        self._patterns, self._rank = patterns, rank
        self._begun = b""

    def take(self, data: bytes) -> None:
        """Takes bytes that the rank has written."""
        *lines, last = _END.split(data)
        for line in lines:
            self._search(self._begun + line)
            self._begun = b""
        self._begun = (self._begun + last)[:_LONGEST_LINE]

    def end(self) -> None:
        """Searches the last line, which may have no end."""
        self._search(self._begun)
        self._begun = b""

    def _search(self, line: bytes) -> None:
        if line:
            self._patterns.search(self._rank, line[:_LONGEST_LINE].decode("utf-8", "replace"))


def check_patterns(option: str, patterns: Sequence[str]) -> None:
    """Checks that these are regular expressions.

    Raises:
        UsageError: one isn't.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{option} {pattern}: no regular expression: {error}") from None
