"""Measures some training runs of this process, the same ones on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from typing import Any, Callable

from collective.coordination import barrier
from collective.coordination.prepared_run import PreparedRun
from collective.ops.communication import collectives
from collective.ops.communication.horovod_library import hvd
from collective.ops.graph import graph_state
from collective.options import ScopeOptions
from collective.plan import graph_workload
from collective.plan.forecast.placement_plan import write_tables
from collective.plan.graph_workload import NoTables
from collective.plan.known_runs import KnownRuns
from collective.profiling import breakdown, trace
from collective.profiling.owner_balance import BalanceWarning
from collective.profiling.report_writer import PAGE, ReportWriter, circumstances
from collective.profiling.run_tracer import (
    Original,
    RunTracer,
    TracedRun,
    UnreadRun,
    mean_carried,
    warns_of_errors,
)
from collective.profiling.summaries import ScalarWriter

TABLES = "tables.yml"
# More traces than this are read while training goes on, so that they don't fill the memory.
MOST_UNREAD = 50


class Profiler:
    """Traces training runs `first` to `last` of this process, and every `every`-th; 0: none.

    The first run has the number 1. Ranks measure the same runs, and meet after the last of them to
    combine their measurements. In `folder` every rank writes rank_<r>.trace.json, for
    chrome://tracing or Perfetto, and into rank_<r>/, for TensorBoard, TensorFlow's own profile of
    the last run; rank 0 writes split.json, report.html (see `collective.profiling.report`),
    tables.yml for the planner, scalars for TensorBoard and, where Horovod lets it, Horovod's
    timeline.
    """

    def __init__(self, folder: str, first: int, last: int, every: int):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.first, self.last, self.every = folder, first, last, every
        self.count = 0
        self._tracer, self._balance = RunTracer(), BalanceWarning()
        self._unread: list[UnreadRun] = []
        self._traced: list[TracedRun] = []
        self._report = ReportWriter(folder)
        self._writer: ScalarWriter | None = None
        self._timeline = False

    def watch(
        self,
        original: Original,
        session: Any,
        run: PreparedRun,
        carry_out: Callable[[Original], Any],
    ) -> Any:
        """Carries out a training run, and measures it if it is its turn.

        Args:
            original: `Session.run`.
            session: the session.
            run: the run.
            carry_out: carries it out, given a replacement of `original`.
        """
        number = self.count + 1
        in_window = self.first <= number <= self.last
        if number == self.first and not self._timeline:
            self._start_timeline()
        if not (in_window or self.every and number % self.every == 0):
            out = carry_out(original)
            if number == self.first - 2:
                self._tracer.warm_up(session, number)
        else:
            folder = None
            if number == self.last:
                folder = os.path.join(self.folder, f"rank_{collectives.rank()}")
            out, unread = self._tracer.trace(original, session, run, carry_out, number, folder)
            self._unread.append(unread)
            if number == self.last or not in_window:
                self._combine(session)
            elif len(self._unread) == MOST_UNREAD:
                self._read()
        self.count = number
        self._tracer.has_run()
        return out

    def finish(self) -> None:
        """Writes what is left when training is over, without the other ranks' parts."""
        self._read()
        traced_runs, self._traced = self._traced, []
        with warns_of_errors("the profile"):
            if traced_runs:
                self._write_traces(traced_runs)
                if collectives.rank() == 0:
                    self._write_own(traced_runs)
            self._report.write_again(at_once=True)

    def _write_own(self, traced_runs: list[TracedRun]) -> None:
        """Writes the measurements of rank 0 alone."""
        steps = [traced.step for traced in traced_runs]
        own_breakdown = breakdown.combine([steps], [mean_carried(traced_runs)])
        _print(
            breakdown.text(own_breakdown, [0])
            + f"\n(of rank 0 alone: training ended before step {self.last})"
        )
        for step in steps:
            self._report.add(breakdown.combine([[step]]))
        record = {
            **own_breakdown.to_dict(),
            "of_steps": [[dataclasses.asdict(step) for step in steps]],
            "alone": collectives.size() > 1,
        }
        self._write_report(record, traced_runs[-1], None)

    # -- one run

    def _read(self) -> None:
        """Reads the traces of runs.

        If traces were read after each run, that would take one rank longer than another, and the
        difference would look as if the other had waited in the next run.
        """
        unread, self._unread = self._unread, []
        self._traced += map(self._tracer.read, unread)

    # -- all ranks

    def _start_timeline(self) -> None:
        if hvd and collectives.size() > 1 and os.environ.get("HOROVOD_TIMELINE") == "DYNAMIC":
            with warns_of_errors("Horovod's timeline"):
                hvd.start_timeline(os.path.join(self.folder, "horovod.json"))
                self._timeline = True

    def _combine(self, session: Any) -> None:
        """Combines all ranks' measurements, and writes them."""
        self._read()
        traced_runs, self._traced = self._traced, []
        numbers = [traced.step.number for traced in traced_runs]
        ends_window = self.last in numbers
        if ends_window:
            self._write_traces(traced_runs)
        messages = barrier.exchange(
            session,
            f"puts together the profile of steps {numbers[0]} to {numbers[-1]}",
            {
                "steps": [dataclasses.asdict(traced.step) for traced in traced_runs],
                "carried": mean_carried(traced_runs),
            },
        )
        steps_by_rank = [
            [breakdown.StepTimes(**step) for step in message["steps"]] for message in messages
        ]
        combined = breakdown.combine(steps_by_rank, [message["carried"] for message in messages])
        known = graph_state.of(session.graph, KnownRuns)
        known.received_bytes = combined.received[collectives.rank()]
        known.keys_per_owner = combined.keys_per_owner
        known.measured = breakdown.measured_steps(combined)
        if collectives.rank() > 0:
            return
        self._balance.look(session.graph, combined.keys_per_owner)
        with warns_of_errors("the profile"):
            if ends_window:
                _print(breakdown.text(combined, range(len(messages))))
            self._writer = self._writer or ScalarWriter(self.folder)
            for i, traced in enumerate(traced_runs):
                of_step = breakdown.combine([[steps[i]] for steps in steps_by_rank])
                self._writer.add(of_step, traced.source.global_step)
                self._report.add(of_step)
            self._report.write_again()
            if ends_window:
                record = {**combined.to_dict(), "of_steps": [m["steps"] for m in messages]}
                self._write_report(record, traced_runs[-1], session)
                self._write_tables(session)

    def _write_report(self, record: dict[str, Any], traced: TracedRun, session: Any) -> None:
        """Writes split.json and the page.

        Args:
            record: the measurements.
            traced: a run that was measured.
            session: the session of the run; None if it is closed.
        """
        about: dict[str, Any] = {"ranks": collectives.size()}
        with warns_of_errors("the plan in the profile"):
            source = traced.source
            about = circumstances(source.graph, source.run, session, source.options)
        self._report.write({**record, **about})
        _print(f"collective: {os.path.join(self.folder, PAGE)} shows this as a picture")

    def _write_tables(self, session: Any) -> None:
        """Writes what the planner has to know, for `collective plan` and for the next start."""
        with warns_of_errors("the tables for the planner"), contextlib.suppress(NoTables):
            described = graph_workload.of_graph(session.graph, session)
            write_tables(os.path.join(self.folder, TABLES), described)

    def _write_traces(self, traced_runs: list[TracedRun]) -> None:
        if self._timeline:
            self._timeline = False
            with warns_of_errors("Horovod's timeline"):
                hvd.stop_timeline()
        rank = collectives.rank()
        with warns_of_errors("the trace"):
            events = []
            for traced in traced_runs:
                events += trace.events(traced.spans, rank, traced.step.number)
            trace.write(os.path.join(self.folder, f"rank_{rank}.trace.json"), events, rank)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_profilers: dict[tuple[Any, ...], Profiler] = {}


def of_options(options: ScopeOptions) -> Profiler | None:
    """Returns the profiler of these options, the same one each time; None without a folder.

    Raises:
        OSError: the folder can't be made.
    """
    if options.profile is None:
        return None
    key = (os.path.abspath(options.profile), *options.profile_steps, options.profile_every)
    if key not in _profilers:
        _profilers[key] = Profiler(*key)
    return _profilers[key]


def finish() -> None:
    """Lets all profilers write what is left when the outermost scope() ends."""
    for profiler in _profilers.values():
        profiler.finish()
