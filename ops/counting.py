"""Counts things in words: '1 table', '2 tables'."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Returns a number with its noun: '1 table', '2 tables', '12,000 rows'.

    Args:
        number: how many there are.
        noun: what one of them is called.
        plural: what several of them are called; by default the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
