"""Names ranks in messages; the names stay short for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable


def rank_names(ranks: Iterable[int]) -> str:
    """Returns "rank 3", or "ranks 0, 2-4" for ascending ranks."""
    ranges: list[list[int]] = []
    count = 0
    for rank in ranks:
        count += 1
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts = []
    for range_ in ranges:
        if len(range_) > 2:
            parts.append(f"{range_[0]}-{range_[-1]}")
        else:
            parts.append(", ".join(map(str, range_)))
    return f"rank{'s' if count > 1 else ''} {', '.join(parts)}"
