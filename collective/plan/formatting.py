"""Formats tables of text, for what rank 0 prints."""

from __future__ import annotations

from collections.abc import Sequence


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
    """Formats bytes in powers of 1000: '1.5 MB'; '?' where the count isn't known."""
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            break
        count, unit = count / 1000, "TB"
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"


def imbalance(parts: Sequence[float]) -> float | None:
    """Returns the largest part over their mean, 1 if all are equal; None if all are empty."""
    return max(parts) * len(parts) / sum(parts) if sum(parts) > 0 else None
