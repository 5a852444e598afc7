"""Tables as text, for what rank 0 prints."""

from __future__ import annotations

from collections.abc import Sequence


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of aligned columns, the first `left` of them to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in [head, *rows]
    ]


def in_bytes(count: float | None) -> str:
    """'1.5 MB', in powers of 1000; '?' where it isn't known."""
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            break
        count, unit = count / 1000, "TB"
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"


def imbalance(parts: Sequence[float]) -> float | None:
    """The largest part over their mean, 1 if all are equal; None if there is nothing."""
    return max(parts) * len(parts) / sum(parts) if sum(parts) > 0 else None
