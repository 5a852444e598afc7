"""Keeps the course of a job in a limited number of points."""

from __future__ import annotations

import dataclasses
from typing import Any

MOST_POINTS = 200


@dataclasses.dataclass(frozen=True)
class Point:
    """Keeps the measurements of one step, on all ranks together.

    Attributes:
        step: the number of the training run.
        ms: the milliseconds of the step, the mean over ranks.
        samples_per_s: None if there was no lookup.
        rows: the rows of dynamic tables, by name.
    """

    step: int
    ms: float
    samples_per_s: float | None
    rows: dict[str, int]


class History:
    """Keeps points by ascending steps.

    If there are too many, the point whose neighbours are closest is removed, so that old and new
    points become equally far apart. The first and the last stay.
    """

    def __init__(self, most: int = MOST_POINTS):
        self.points: list[Point] = []
        self._most = most

    def add(self, point: Point) -> None:
        points = self.points
        points.append(point)
        if len(points) > self._most:
            inner = range(1, len(points) - 1)
            del points[min(inner, key=lambda i: points[i + 1].step - points[i - 1].step)]

    def to_dict(self) -> dict[str, Any]:
        """Returns lists of equal length; a table that didn't exist yet has no rows."""
        tables = sorted({table for point in self.points for table in point.rows})
        return {
            "step": [point.step for point in self.points],
            "ms": [point.ms for point in self.points],
            "samples_per_s": [point.samples_per_s for point in self.points],
            "rows": {table: [p.rows.get(table, 0) for p in self.points] for table in tables},
        }
