"""Chooses what a page shows: the largest items, and the rest as one item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

MOST = 10
# With more ranks, the page shows some of them, and all after a click.
MOST_RANKS = 12
RANKS_OF_EACH_END = 4


class Selection(NamedTuple):
    """Holds the largest items.

    Attributes:
        names: the names of the largest, in descending order.
        others: the names of the rest.
    """

    names: list[str]
    others: list[str]


def largest(sizes: Mapping[str, float], most: int = MOST) -> Selection:
    """Selects the largest of `sizes`; if the rest is a single item, it is shown like the others."""
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    if len(names) <= most + 1:
        return Selection(names, [])
    return Selection(names[:most], names[most:])


def shown_ranks(waits: Sequence[float]) -> list[int]:
    """Returns the ranks that are shown at first: all, or those that wait least and most."""
    ranks = range(len(waits))
    if len(waits) <= MOST_RANKS:
        return list(ranks)
    by_wait = sorted(ranks, key=lambda rank: (waits[rank], rank))
    return [*by_wait[:RANKS_OF_EACH_END], *by_wait[-RANKS_OF_EACH_END:]]
