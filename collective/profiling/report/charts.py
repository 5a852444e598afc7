"""Computes what the templates draw: bars, columns, lines and tables, without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple

# If there are more columns, neighbours are combined: each shows the largest of its ranks.
MOST_COLUMNS = 128
# With up to this many ranks each column shows its number, or even its value.
MOST_LABELS, MOST_VALUES = 16, 4
# A narrower part of a bar has no text in it.
LEAST_LABELLED = 0.09


class Part(NamedTuple):
    """Describes a part of a bar.

    Attributes:
        kind: the class that colours it.
        title: its name and value.
        percent: its share of the whole width.
        words: the text in it; None if it is too narrow.
    """

    kind: str
    title: str
    percent: float
    words: str | None


class Bar(NamedTuple):
    """Describes a row: a label, a bar of parts from left to right, and their sum as text.

    Attributes:
        kind: further classes of the row.
    """

    label: str
    parts: list[Part]
    value: str
    kind: str


class Columns(NamedTuple):
    """Describes a column for each rank, and a line at their mean.

    Attributes:
        columns: (title, percent of the height) of each.
        mean: the same of the line.
        labels: the texts below.
        kind: "few" if they have the values, "each" if they are the ranks, else "ends".
    """

    columns: list[tuple[str, float]]
    mean: tuple[str, float]
    labels: list[str]
    kind: str


class Line(NamedTuple):
    """Describes a line of a chart: its name, and its points by ascending x."""

    name: str
    points: Sequence[tuple[float, float]]


class LineChart(NamedTuple):
    """Describes lines over steps, from zero.

    Attributes:
        name: the names of all lines.
        polylines: the points of each, in a field of 1000 by 100.
        heights: the texts next to the field, from the top.
        first, last: the first and last step, as text.
    """

    name: str
    polylines: list[str]
    heights: list[str]
    first: str
    last: str


class Swatched(NamedTuple):
    """Describes a cell of a table that shows a phase and its colour."""

    kind: str
    name: str


class Table(NamedTuple):
    """Describes a table whose first `left` columns are aligned left, and the others right."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    left: int = 1
    kind: str = ""


def kind_of(name: str) -> str:
    """Returns the class that colours a phase."""
    return "of-" + name.replace(" ", "-")


def bar(
    label: str,
    values: Mapping[str, float],
    scale: float,
    text: Callable[[float], str],
    kind: str = "",
) -> Bar:
    """Computes a bar.

    Args:
        label: the label on the left.
        values: by phase, from left to right.
        scale: the value that takes the whole width. A longer bar also takes the whole width, and
            fades out.
        text: formats values.
        kind: a further class of the row.
    """
    total = sum(values.values())
    if total > 1.0001 * scale > 0:
        scale, kind = total, f"{kind} beyond".strip()
    shares = {name: value / scale if scale > 0 else 0.0 for name, value in values.items()}
    parts = [
        Part(
            kind_of(name),
            f"{name}: {text(values[name])}",
            share * 100,
            text(values[name]) if share >= LEAST_LABELLED else None,
        )
        for name, share in shares.items()
        if share > 0
    ]
    return Bar(label, parts, text(total), kind)


def columns(values: Sequence[float], scale: float, text: Callable[[float], str]) -> Columns:
    """Computes a column for each rank.

    Args:
        values: by rank.
        scale: the value that takes the whole height.
        text: formats values.
    """

    def percent(value: float) -> float:
        return value / scale * 100 if scale > 0 else 0.0

    count = len(values)
    width = math.ceil(count / MOST_COLUMNS) or 1
    drawn = []
    for first in range(0, count, width):
        several = values[first : first + width]
        last = first + len(several) - 1
        of = f"rank {first}" if last == first else f"ranks {first} to {last}, at most"
        drawn.append((f"{of}: {text(max(several))}", percent(max(several))))
    mean = sum(values) / count
    line = (f"mean: {text(mean)}", percent(mean))
    if count <= MOST_VALUES:
        labels = [f"rank {rank}: {text(value)}" for rank, value in enumerate(values)]
        return Columns(drawn, line, labels, "few")
    if count <= MOST_LABELS:
        return Columns(drawn, line, [str(rank) for rank in range(count)], "each")
    return Columns(drawn, line, ["rank 0", f"rank {count - 1}"], "ends")


def lines(drawn: Sequence[Line], most: float, text: Callable[[float], str]) -> LineChart:
    """Computes lines over steps.

    Args:
        drawn: the lines, at most eleven of which have their own colours. The first one has the
            range of steps.
        most: the value at the top.
        text: formats values.
    """
    left, right = drawn[0].points[0][0], drawn[0].points[-1][0]
    polylines = []
    for line in drawn:
        points = []
        for x, y in line.points:
            across = (x - left) / (right - left) * 1000 if right > left else 500
            points.append(f"{across:.1f},{100 - (y / most * 100 if most > 0 else 0):.2f}")
        polylines.append(" ".join(points if len(points) > 1 else points * 2))
    name = ", ".join(line.name for line in drawn)
    heights = [text(most * share) for share in (1, 0.5, 0)]
    return LineChart(name, polylines, heights, f"{left:,.0f}", f"{right:,.0f}")
