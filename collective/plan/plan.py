"""Defines the plan of a graph: what was built, as data and as the text that rank 0 prints."""

from __future__ import annotations

import dataclasses

from collective.plan import summary, text
from collective.plan.data import PlanData
from collective.plan.formatting import MOST_LINES


@dataclasses.dataclass(frozen=True)
class Plan(PlanData):
    """Describes what was built for a graph (see `PlanData`).

    `str(plan)` lists everything if that takes few lines, and summarizes otherwise.
    """

    def to_text(self, full: bool = False) -> str:
        """Returns the plan as text.

        Args:
            full: lists every table and every exchange, in lines of any length. Otherwise a plan of
                more than `MOST_LINES` lines becomes a summary of at most that many, whose lines on
                a terminal are no longer than `MOST_COLUMNS`.
        """
        lines = text.lines_of(self, full)
        if not full and len(lines) > MOST_LINES:
            lines = summary.lines_of(self)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text()
