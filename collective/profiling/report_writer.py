"""Writes split.json and report.html on rank 0, and keeps them up to date."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.prepared_run import PreparedRun
from collective.ops.communication import collectives
from collective.options import ScopeOptions
from collective.plan.builder import build_plan
from collective.profiling.breakdown import Breakdown
from collective.profiling.history import History, Point
from collective.profiling.report import profile
from collective.profiling.report.page import page
from collective.version import __version__

PAGE = "report.html"
# After the window the files are written again only so many seconds after the last time.
PAUSE = 60.0
# Options that say nothing about how a job trains.
OUTPUT_OPTIONS = frozenset({"plan", "profile", "profile_steps", "profile_every"})


class ReportWriter:
    """Collects what a page shows, and writes it to `folder`."""

    def __init__(self, folder: str):
        self._folder = folder
        self._history = History()
        self._record: dict[str, Any] = {}
        self._written_at = 0.0
        self._is_stale = False

    def add(self, of_step: Breakdown) -> None:
        """Adds one step to the course of the job. It is written later."""
        rows = {table: sum(counts) for table, counts in of_step.dynamic_rows.items()}
        mean_ms = sum(of_step.ms) / len(of_step.ms)
        self._history.add(Point(of_step.first, mean_ms, of_step.samples_per_s, rows))
        if self._record:
            self._record["dynamic_rows"] = of_step.dynamic_rows
            self._is_stale = True

    def write(self, record: dict[str, Any]) -> None:
        """Writes the files.

        Args:
            record: everything in split.json except the course of the job.
        """
        self._record, self._is_stale = record, False
        self._written_at = time.monotonic()
        whole = {**record, "history": self._history.to_dict()}
        profile.save(self._folder, whole)
        name = os.path.basename(os.path.abspath(self._folder))
        text = page([profile.from_record(name, whole)])
        profile.write(os.path.join(self._folder, PAGE), text)

    def write_again(self, at_once: bool = False) -> None:
        """Writes the files again if steps were added.

        Args:
            at_once: also if they were written a moment ago.
        """
        if self._is_stale and (at_once or time.monotonic() - self._written_at > PAUSE):
            self.write(self._record)


def circumstances(
    graph: tf.Graph, run: PreparedRun, session: Any, options: ScopeOptions
) -> dict[str, Any]:
    """Returns what split.json says about the job in addition to its times.

    Args:
        graph: the graph.
        run: the run that was measured.
        session: the session in which dynamic tables are counted; None if it is closed.
        options: the options in force.
    """
    return {
        "plan": build_plan(graph, run.footprint, session).to_dict(),
        "options": _given(options),
        "ranks": collectives.size(),
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "version": __version__,
    }


def _given(options: ScopeOptions) -> dict[str, Any]:
    """Returns the options that differ from the default, as values for JSON."""
    given = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in OUTPUT_OPTIONS:
            plain = value is None or isinstance(value, (bool, int, float, str))
            given[field.name] = value if plain else str(value)
    return given
