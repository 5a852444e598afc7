"""Warnings that all ranks write alike are shown once, as one rank writes them: the reference.

A warning of another rank is held until the reference has written the same, and then dropped; each
occurrence of one is matched with one of the other. What the reference hasn't written after a while
is the rank's own and is shown.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .stderr_lines import without_volatile

# For how many seconds the reference may be behind another rank.
PATIENCE = 10.0
_MOST_KNOWN = 2000
_MOST_HELD = 200


@dataclass
class HeldWarning:
    """Holds a warning that the reference hasn't written.

    Attributes:
      lines: as the first of the ranks wrote them.
      since: when that was.
      occurrences: how often each rank wrote it.
    """

    lines: tuple[str, ...]
    since: float
    occurrences: Counter[int] = field(default_factory=Counter)


class RepeatedWarnings:
    """Matches the ranks' warnings. Times are seconds of a clock that only goes forward."""

    def __init__(self, reference: int) -> None:
        self._reference = reference
        self._occurrences: OrderedDict[tuple[str, ...], Counter[int]] = OrderedDict()
        self._held: OrderedDict[tuple[str, ...], HeldWarning] = OrderedDict()

    def add(self, rank: int, lines: Sequence[str], now: float) -> None:
        """Counts a warning. One of the reference's is taken for shown."""
        key = tuple(without_volatile(line) for line in lines)
        counts = self._occurrences.setdefault(key, Counter())
        self._occurrences.move_to_end(key)
        if len(self._occurrences) > _MOST_KNOWN:
            self._occurrences.popitem(last=False)
        counts[rank] += 1
        if rank == self._reference:
            self._match(key)
        elif counts[rank] > counts[self._reference]:
            held = self._held.setdefault(key, HeldWarning(tuple(lines), now))
            held.occurrences[rank] += 1

    def next_time(self) -> float:
        """Returns when to take the next warnings; infinity if none is held."""
        if not self._held:
            return math.inf
        if len(self._held) > _MOST_HELD:
            return -math.inf
        return next(iter(self._held.values())).since + PATIENCE

    def take_due(self, now: float) -> list[HeldWarning]:
        """Takes the warnings that have waited long enough, or are too many."""
        due = []
        while self.next_time() <= now:
            due.append(self._held.popitem(last=False)[1])
        return due

    def take_all(self) -> list[HeldWarning]:
        held = list(self._held.values())
        self._held.clear()
        return held

    def _match(self, key: tuple[str, ...]) -> None:
        """Drops one occurrence of each rank that waited for the reference's."""
        held = self._held.get(key)
        if held is None:
            return
        for rank in list(held.occurrences):
            held.occurrences[rank] -= 1
            if not held.occurrences[rank]:
                del held.occurrences[rank]
        if not held.occurrences:
            del self._held[key]
