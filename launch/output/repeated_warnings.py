"""Shows warnings that all ranks write alike once, as the reference (one of the ranks) writes them.

A warning of another rank is held until the reference has written the same, and is then dropped.
Each occurrence is matched with one occurrence on the reference at about the same time. A warning
that the reference hasn't written after a while is the rank's own, and is shown.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from collective.launch.output.stderr_lines import without_volatile

# How many seconds the reference may be late compared with another rank.
PATIENCE = 10.0
# How many seconds the reference may be early compared with another rank.
LEAD = 60.0
_MOST_KNOWN = 2000
_MOST_HELD = 200


@dataclass
class HeldWarning:
    """Holds a warning that the reference hasn't written.

    Attributes:
      lines: the lines as the first of the ranks wrote them.
      since: when that was.
      occurrences: how often each rank wrote it.
    """

    lines: tuple[str, ...]
    since: float
    occurrences: Counter[int] = field(default_factory=Counter)


class _ReferenceOccurrences:
    """Counts the reference's occurrences of one warning; each rank may match each of them once."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque()  # second, and the count in it
        self._count = 0
        self._expired = 0
        self._matched: dict[int, int] = {}  # for each rank, the occurrences it can no longer match

    def add(self, now: float) -> None:
        self._count += 1
        second = int(now)
        in_second = self._recent.pop()[1] if self._is_of(second) else 0
        self._recent.append((second, in_second + 1))
        self._expire(now)

    def match(self, rank: int, now: float) -> bool:
        """Matches an occurrence on another rank. Returns whether there was one to match."""
        self._expire(now)
        matched = max(self._matched.get(rank, 0), self._expired)
        if matched == self._count:
            return False
        self._matched[rank] = matched + 1
        return True

    def _is_of(self, second: int) -> bool:
        return bool(self._recent) and self._recent[-1][0] == second

    def _expire(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - LEAD:
            self._expired += self._recent.popleft()[1]


class RepeatedWarnings:
    """Matches the ranks' warnings. Times are seconds of a clock that only goes forward."""

    def __init__(self, reference: int) -> None:
        self._reference = reference
        self._occurrences: OrderedDict[tuple[str, ...], _ReferenceOccurrences] = OrderedDict()
        self._held: OrderedDict[tuple[str, ...], HeldWarning] = OrderedDict()

    def add(self, rank: int, lines: Sequence[str], now: float) -> None:
        """Counts a warning. A warning of the reference counts as shown."""
        key = tuple(without_volatile(line) for line in lines)
        occurrences = self._occurrences.setdefault(key, _ReferenceOccurrences())
        self._occurrences.move_to_end(key)
        if len(self._occurrences) > _MOST_KNOWN:
            self._occurrences.popitem(last=False)
        if rank == self._reference:
            occurrences.add(now)
            self._match(key, occurrences, now)
        elif not occurrences.match(rank, now):
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

    def _match(self, key: tuple[str, ...], occurrences: _ReferenceOccurrences, now: float) -> None:
        """Drops one occurrence on each rank that waited for the reference's."""
        held = self._held.get(key)
        if held is None:
            return
        for rank in list(held.occurrences):
            occurrences.match(rank, now)
            held.occurrences[rank] -= 1
            if not held.occurrences[rank]:
                del held.occurrences[rank]
        if not held.occurrences:
            del self._held[key]
