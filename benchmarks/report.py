"""Formats what the benchmarks print: tables in Markdown, and how busy the machine is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence


def heading(names: Sequence[str]) -> str:
    """Returns the first two lines of a table."""
    return row(names) + "\n" + "|---" * len(names) + "|"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(names: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join([heading(names), *map(row, rows)])


def number(value: float | None, digits: int = 2) -> str:
    """Returns a number as a cell: empty if there is none."""
    return "" if value is None else f"{value:,.{digits}f}"


def machine_load() -> str:
    return f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors"
