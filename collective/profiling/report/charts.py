"""Draws bars, columns and lines in HTML and SVG, without scripts or external files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Callable, NamedTuple

from collective.profiling.report.markup import Markup, element

# If there are more columns, neighbours are combined: each shows the largest of its ranks.
MOST_COLUMNS = 128
# With up to this many ranks each column shows its number, or even its value.
MOST_LABELS, MOST_VALUES = 16, 4
# A narrower part of a bar has no text in it.
LEAST_LABELLED = 0.09


class Part(NamedTuple):
    """Describes a part of a bar: its colour, name and value."""

    kind: str
    name: str
    value: float


class Line(NamedTuple):
    """Describes a line of a chart: its name, and its points by ascending x."""

    name: str
    points: Sequence[tuple[float, float]]


def kind_of(name: str) -> str:
    """Returns the class that colours a phase."""
    return "of-" + name.replace(" ", "-")


def bar(
    label: str, parts: Sequence[Part], scale: float, text: Callable[[float], str], kind: str = ""
) -> Markup:
    """Draws one row: a label, a bar of parts, and their sum.

    Args:
        label: the label on the left.
        parts: from left to right.
        scale: the value that takes the whole width. A longer bar also takes the whole width, and
            fades out.
        text: formats values.
        kind: a further class of the row.
    """
    total, drawn = sum(part.value for part in parts), []
    if total > 1.0001 * scale > 0:
        scale, kind = total, f"{kind} beyond"
    for part in parts:
        share = part.value / scale if scale > 0 else 0.0
        if share > 0:
            words = text(part.value) if share >= LEAST_LABELLED else None
            drawn.append(
                element(
                    "span",
                    words and element("span", words),
                    class_=f"part {part.kind}",
                    style=f"width:{share * 100:.3f}%",
                    title=f"{part.name}: {text(part.value)}",
                )
            )
    return element(
        "div",
        element("span", label, class_="label", title=label),
        element("span", drawn, class_="track"),
        element("span", text(total), class_="value"),
        class_=f"bar {kind}".strip(),
    )


def legend(kinds: Sequence[tuple[str, str]]) -> Markup:
    """Draws the colours: (class, name) of each."""
    items = [element("li", element("span", class_=f"swatch {kind}"), name) for kind, name in kinds]
    return element("ul", items, class_="legend")


def columns(values: Sequence[float], scale: float, text: Callable[[float], str]) -> Markup:
    """Draws a column for each rank, and a line at their mean.

    Args:
        values: by rank.
        scale: the value that takes the whole height.
        text: formats values.
    """
    width = math.ceil(len(values) / MOST_COLUMNS) or 1
    drawn = []
    for first in range(0, len(values), width):
        several = values[first : first + width]
        last = first + len(several) - 1
        of = f"rank {first}" if last == first else f"ranks {first} to {last}, at most"
        height = max(several) / scale * 100 if scale > 0 else 0
        drawn.append(
            element(
                "span",
                element("span", style=f"height:{height:.2f}%"),
                title=f"{of}: {text(max(several))}",
            )
        )
    mean = sum(values) / len(values)
    at = mean / scale * 100 if scale > 0 else 0
    line = element("i", style=f"bottom:{at:.2f}%", title=f"mean: {text(mean)}")
    few = len(values) <= MOST_VALUES
    if few:
        labels = [f"rank {rank}: {text(value)}" for rank, value in enumerate(values)]
    elif len(values) <= MOST_LABELS:
        labels = [str(rank) for rank in range(len(values))]
    else:
        labels = ["rank 0", f"rank {len(values) - 1}"]
    kind = "ends" if len(values) > MOST_LABELS else "each"
    return element(
        "div",
        element("div", drawn, line, class_="columns"),
        element("div", [element("span", label) for label in labels], class_=kind),
        class_="column-chart few" if few else "column-chart",
    )


def lines(
    drawn: Sequence[Line],
    most: float,
    text: Callable[[float], str],
    x_name: str,
    x_range: tuple[float, float],
) -> Markup:
    """Draws lines over steps, from zero.

    Args:
        drawn: the lines, at most eleven of which have their own colours.
        most: the value at the top.
        text: formats values.
        x_name: says what runs to the right.
        x_range: the first and last x.
    """
    (left, right), polylines = x_range, []
    for i, line in enumerate(drawn):
        points = []
        for x, y in line.points:
            across = (x - left) / (right - left) * 1000 if right > left else 500
            points.append(f"{across:.1f},{100 - (y / most * 100 if most > 0 else 0):.2f}")
        polylines.append(
            element(
                "polyline",
                points=" ".join(points if len(points) > 1 else points * 2),
                class_=f"line-{i}",
            )
        )
    svg = element(
        "svg",
        polylines,
        viewBox="0 0 1000 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=", ".join(line.name for line in drawn),
    )
    heights = [element("span", text(most * share)) for share in (1, 0.5, 0)]
    return element(
        "div",
        element("div", heights, class_="heights"),
        element("div", svg, class_="plot"),
        element(
            "div",
            element("span", f"{x_name} {left:,.0f}"),
            element("span", f"{right:,.0f}"),
            class_="ends",
        ),
        class_="line-chart",
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1, kind: str = ""
) -> Markup:
    """Draws a table whose first `left` columns are aligned left, and the others right."""

    def cells(name: str, row: Sequence[object]) -> list[Markup]:
        return [
            element(name, cell, class_=None if i < left else "number") for i, cell in enumerate(row)
        ]

    body = [element("tr", cells("td", row)) for row in rows]
    return element(
        "div",
        element(
            "table",
            element("thead", element("tr", cells("th", head))),
            element("tbody", body),
        ),
        class_=f"scroll {kind}".strip(),
    )
