"""Draws courses of losses as an SVG, by Python alone.

    python modelzoo/loss_curve.py curve.svg dlrm=dlrm.tsv din=din.tsv
    python modelzoo/loss_curve.py rows.svg --column rows bounded=bounded.tsv free=free.tsv
    python modelzoo/loss_curve.py job.svg --column loss --column auc job=model/metrics.jsonl

Each file is one that a program's --losses wrote: lines 'step <tab> loss'. Or with --column it is
one that --course wrote: a first line names the columns, of which 'step' and the given one are read.
Or it is the metrics.jsonl of a Trainer: each --column, a metric, gets a diagram, with a curve of
training and one of validation where the file has them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
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


def read_metric(path: Path, metric: str) -> dict[str, Course]:
    """Returns (step, value) of a metric in a Trainer's metrics.jsonl: of training, of validation.

    Raises:
        ValueError: a line is another, or neither has a value.
    """
    courses: dict[str, Course] = {"training": [], "validation": []}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            fields = json.loads(line)
            course, step = courses[fields["kind"]], float(fields["step"])
            value = fields["metrics"].get(metric)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path}, line {number}: {line!r} isn't one of a Trainer") from None
        if value is not None:  # null where it wasn't finite
            course.append((step, float(value)))
    found = {kind: course for kind, course in courses.items() if course}
    if not found:
        raise ValueError(f"{path}: it has no value of {metric!r}")
    return found


def draw_metrics(paths: Mapping[str, Path], metrics: Sequence[str]) -> str:
    """Returns the SVG of a diagram for each metric, below each other, of metrics.jsonl files.

    Args:
        paths: of the files, by the names of their curves.
        metrics: names of metrics.

    Raises:
        ValueError: as for `read_metric`.
    """
    diagrams = []
    for metric in metrics:
        courses = {}
        for name, path in paths.items():
            for kind, course in read_metric(path, metric).items():
                courses[kind if len(paths) == 1 else f"{name}, {kind}"] = course
        diagrams.append(_diagram(courses, metric))
    places = (f'<g transform="translate(0 {HEIGHT * k})">' for k in range(len(diagrams)))
    return _svg(
        [part for place, d in zip(places, diagrams) for part in (place, *d, "</g>")], len(diagrams)
    )


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
    return _svg(_diagram(courses, label))


def _svg(parts: list[str], diagrams: int = 1) -> str:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT * diagrams}"'
    font = 'font-family="sans-serif" font-size="12"'
    root = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    return "\n".join([root, *parts, "</svg>", ""])


def _diagram(courses: dict[str, Course], label: str) -> list[str]:
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
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
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
        if len(course) == 1:  # no line: a short training has reported once
            place = points.split(",")
            parts.append(f'<circle cx="{place[0]}" cy="{place[1]}" r="2.5" fill="{colour}"/>')
        line = TOP + 20 + 18 * number
        parts.append(
            f'<path d="M{right + 12} {line}h18" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{right + 36}" y="{line + 4}">{escape(name)}</text>'
        )
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws courses of losses as an SVG.")
    parser.add_argument("svg", type=Path, help="the file to write")
    parser.add_argument(
        "courses", nargs="+", metavar="name=file", help="what --losses wrote, or --course"
    )
    parser.add_argument(
        "--column",
        action="append",
        help="the column to draw of what --course wrote: auc, rows, …; a metric of metrics.jsonl, "
        "as often as there are diagrams",
    )
    parser.add_argument("--label", help="the words on the curve; without them the column's name")
    options = parser.parse_args()
    paths = {}
    for argument in options.courses:
        name, separator, path = argument.partition("=")
        if not separator:
            parser.error(f"{argument!r} instead of name=file")
        paths[name] = Path(path)
    columns = options.column or []
    try:
        if all(path.suffix == ".jsonl" for path in paths.values()):
            drawn = draw_metrics(paths, columns or ["loss"])
        elif len(columns) > 1:
            parser.error("several columns are those of metrics.jsonl files alone")
        else:
            column = columns[0] if columns else None
            courses = {name: read(path, column) for name, path in paths.items()}
            drawn = draw(courses, options.label or column or "training loss")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    options.svg.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
