"""Draws courses of losses as an SVG, by Python alone.

    python modelzoo/loss_curve.py curve.svg dlrm=dlrm.tsv din=din.tsv
    python modelzoo/loss_curve.py rows.svg --column rows bounded=bounded.tsv free=free.tsv

Each file is one that a program's --losses wrote: lines 'step <tab> loss'. Or with --column it is
one that --course wrote: a first line names the columns, of which 'step' and the given one are read.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 130, 16, 44  # margins
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
Course = list[tuple[float, float]]


def read(path: Path, column: str | None = None) -> Course:
    """Returns (step, loss) of each line, or (step, value) of a column that the first line names.

    Raises:
        ValueError: a line is another, or there are fewer than two.
    """
    lines, names, value = path.read_text().splitlines(), ["step", "loss"], column or "loss"
    if column is not None:
        names = lines.pop(0).split("\t") if lines else []
        if "step" not in names or column not in names:
            raise ValueError(f"{path}: its first line names {names}, not step and {column}")
    course: Course = []
    for number, line in enumerate(lines, start=1 + (column is not None)):
        fields = line.split("\t")
        try:
            if len(fields) != len(names):
                raise ValueError
            course.append((float(fields[names.index("step")]), float(fields[names.index(value)])))
        except ValueError:
            raise ValueError(f"{path}, line {number}: {line!r} isn't {', '.join(names)}") from None
    if len(course) < 2:
        raise ValueError(f"{path}: a curve needs two points or more")
    return course


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns round numbers from `low` to `high`, at most `most` of them and one."""
    span = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span * 0.999)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw(courses: dict[str, Course], label: str = "training loss") -> str:
    """Returns the SVG of the courses, one line each, with their names.

    `label` says what is drawn over steps.
    """
    steps = [step for course in courses.values() for step, _ in course]
    losses = [loss for course in courses.values() for _, loss in course]
    most, low, high = max(steps), min(losses), max(losses)
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / most

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for loss in ticks(low, high):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{right}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:,.8g}</text>'
        )
    for step in ticks(0, most):
        parts.append(
            f'<text x="{x(step):.1f}" y="{bottom + 16}" text-anchor="middle">{step:g}</text>'
        )
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#444"/>')
    parts.append(
        f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>'
    )
    parts.append(f'<text x="{LEFT + 6}" y="{TOP + 10}">{escape(label)}</text>')
    for number, (name, course) in enumerate(courses.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in course)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        line = TOP + 20 + 18 * number
        parts.append(
            f'<path d="M{right + 12} {line}h18" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{right + 36}" y="{line + 4}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws courses of losses as an SVG.")
    parser.add_argument("svg", type=Path, help="the file to write")
    parser.add_argument(
        "courses", nargs="+", metavar="name=file", help="what --losses wrote, or --course"
    )
    parser.add_argument("--column", help="the column to draw of what --course wrote: auc, rows, …")
    parser.add_argument("--label", help="the words on the curve; without them the column's name")
    options = parser.parse_args()
    courses = {}
    for argument in options.courses:
        name, separator, path = argument.partition("=")
        if not separator:
            parser.error(f"{argument!r} instead of name=file")
        try:
            courses[name] = read(Path(path), options.column)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    label = options.label or options.column or "training loss"
    options.svg.write_text(draw(courses, label), encoding="utf-8")


if __name__ == "__main__":
    main()
