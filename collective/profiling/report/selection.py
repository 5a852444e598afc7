"""Chooses what a page shows of many: the largest ones, and the rest as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

MOST = 10
# Of more ranks the page shows some, and all of them after a click.
MOST_RANKS = 12
RANKS_OF_EACH_END = 4


class Selection(NamedTuple):
    """Holds the largest of many.

    Attributes:
        names: of the largest, in descending order.
        others: the names of the rest.
    """

    names: list[str]
    others: list[str]


def largest(sizes: Mapping[str, float], most: int = MOST) -> Selection:
    """Selects the largest of `sizes`; a rest of one is shown like the others."""
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    if len(names) <= most + 1:
        return Selection(names, [])
    return Selection(names[:most], names[most:])


def shown_ranks(waits: Sequence[float]) -> list[int]:
    """Returns the ranks that are shown at once: all, or those that wait least and most."""
    ranks = range(len(waits))
    if len(waits) <= MOST_RANKS:
        return list(ranks)
    by_wait = sorted(ranks, key=lambda rank: (waits[rank], rank))
    return [*by_wait[:RANKS_OF_EACH_END], *by_wait[-RANKS_OF_EACH_END:]]
