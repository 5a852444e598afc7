"""Counts things in words: '1 rank', '2 ranks'."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, which takes an s where there isn't exactly one."""
    return f"{number} {noun}{'s' * (number != 1)}"
