"""Formats the tables of text that rank 0 prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Callable

# The size of a screen, as far as a plan that is summed up may take it.
MOST_LINES, MOST_COLUMNS = 40, 120
LONGEST_NAME = 40


def screen_columns() -> int:
    """Returns how wide a line may be: without limit if there is no terminal, as in a log.

    The plan is written to stderr, which in a rank is never a terminal: the launcher passes on the
    width of its own.
    """
    launchers = os.environ.get("COLLECTIVE_TERMINAL")
    is_terminal = sys.stderr.isatty() if launchers is None else launchers == "1"
    return MOST_COLUMNS if is_terminal else sys.maxsize


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Returns lines of aligned columns: the first `left` to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = []
    for line in lines:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ]
        out.append("  ".join(cells).rstrip())
    return out


def in_bytes(count: float | None) -> str:
    """Formats bytes in powers of 1000: '1.5 MB'; '?' if the count isn't known."""
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            break
        count, unit = count / 1000, "TB"
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"


def imbalance(parts: Sequence[float]) -> float | None:
    """Returns the largest part divided by the mean, 1 if all are equal; None if all are empty."""
    return max(parts) * len(parts) / sum(parts) if sum(parts) > 0 else None


def largest(values: Iterable[int | None], text: Callable[[int], str]) -> str:
    """Formats the largest of the known values; '?' if none is known."""
    known = [value for value in values if value is not None]
    return text(max(known)) if known else "?"


def ratio(value: float | None) -> str:
    """Formats a ratio; '' if it isn't known."""
    return "" if value is None else f"{value:.2f}"


def cut_off(line: str, most: int) -> str:
    """Returns `line` with no more than `most` characters: '…' stands for its end."""
    return line if len(line) <= most else f"{line[: most - 1]}…"


def distinct(names: Sequence[str], most: int) -> list[str]:
    """Returns names of no more than `most` characters; unchanged if all of them fit.

    Otherwise '…' stands for the scopes that all of them begin or end with, and then for the middle
    of any name that is still too long.
    """
    if all(len(name) <= most for name in names):
        return list(names)
    paths = [name.split("/") for name in names]
    inner = min(len(path) for path in paths) - 1 if len(names) > 1 else 0
    first = _alike([path[:inner] for path in paths])
    last = _alike([path[::-1][: inner - first] for path in paths])
    out = []
    for path in paths:
        name = "/".join(path[first : len(path) - last])
        out.append(shortened(f"{'…/' * (first > 0)}{name}{'/…' * (last > 0)}", most))
    return out


def _alike(paths: Sequence[Sequence[str]]) -> int:
    """Returns how many leading parts all paths have in common."""
    alike = 0
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        alike += 1
    return alike


def shortened(text: str, most: int) -> str:
    """Returns `text` with no more than `most` characters: '…' stands for its middle."""
    if len(text) <= most:
        return text
    last = (most - 1) // 2
    return f"{text[: most - 1 - last]}…{text[len(text) - last :]}"
