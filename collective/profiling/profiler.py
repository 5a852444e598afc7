"""Measures some training runs of this process, the same ones on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination import barrier
from collective.coordination.prepared_run import PreparedRun
from collective.ops.communication import collectives
from collective.ops.communication.horovod_library import hvd
from collective.ops.graph import graph_analysis, graph_state
from collective.ops.graph.sessions import run_unpatched
from collective.options import ScopeOptions
from collective.plan.builder import KnownRuns
from collective.profiling import breakdown, trace
from collective.profiling.lookup_counts import LookupCounter
from collective.profiling.phases import Phases
from collective.profiling.report.phases import OUTSIDE, REST
from collective.profiling.report_writer import PAGE, ReportWriter, circumstances
from collective.profiling.summaries import ScalarWriter
from collective.profiling.table_counter import TableCounter, TableCounts, TableRates
from collective.scope import SCOPES
from collective.tables.dynamic_table import DynamicTable
from collective.tables.rows.row_store import local_counts

Original = Callable[..., Any]
# More traces than this are read while training goes on, so that they don't fill the memory.
MOST_UNREAD = 50


@dataclasses.dataclass(frozen=True)
class UnreadRun:
    """Keeps the trace of a training run until there is time to read it.

    Attributes:
        number: the run's number.
        stats: TensorFlow's trace.
        previous_end, start, end: when the previous run ended, and this one began and ended, in
            seconds.
        global_step: the graph's, after it; the number of the run if there is none.
        dynamic_rows: on this rank after it, by dynamic table.
        table_counts, table_rates: see `collective.profiling.breakdown.StepTimes`.
        graph, run: the graph and the run.
        options: the options in force.
    """

    number: int
    stats: Any
    previous_end: float
    start: float
    end: float
    global_step: int
    dynamic_rows: dict[str, int]
    table_counts: TableCounts
    table_rates: TableRates
    graph: tf.Graph
    run: PreparedRun
    options: ScopeOptions


@dataclasses.dataclass(frozen=True)
class TracedRun:
    """Keeps the measurements of a training run.

    Attributes:
        source: the run.
        step: the times.
        carried: what the exchanges carried (see `collective.profiling.lookup_counts.LookupCounts`).
        spans: the operations that ran.
    """

    source: UnreadRun
    step: breakdown.StepTimes
    carried: breakdown.Carried
    spans: list[trace.Span]


@dataclasses.dataclass(frozen=True)
class RunReader:
    """Holds everything needed to read the traces of a run.

    Attributes:
        run: the run, which keeps its identity meanwhile.
        phases: tells the phases of its operations.
        counter: counts its lookups.
    """

    run: PreparedRun
    phases: Phases
    counter: LookupCounter


class OwnTime:
    """Adds up the seconds that are spent inside it: they aren't part of a step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


class Profiler:
    """Traces training runs `first` to `last` of this process, and every `every`-th; 0: none.

    The first run has the number 1. Ranks measure the same runs, and meet after the last of them to
    combine their measurements. In `folder` every rank writes rank_<r>.trace.json, for
    chrome://tracing or Perfetto, and into rank_<r>/, for TensorBoard, TensorFlow's own profile of
    the last run; rank 0 writes split.json, report.html (see `collective.profiling.report`), scalars
    for TensorBoard and, where Horovod lets it, Horovod's timeline.
    """

    def __init__(self, folder: str, first: int, last: int, every: int):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.first, self.last, self.every = folder, first, last, every
        self.count = 0
        self._last_ended: float | None = None  # when the last training run ended
        self._table_counter = TableCounter()
        self._unread: list[UnreadRun] = []
        self._traced: list[TracedRun] = []
        self._readers: dict[int, RunReader] = {}  # by the identity of the run
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
        began = time.perf_counter()
        if not (in_window or self.every and number % self.every == 0):
            out = carry_out(original)
            if number == self.first - 2:
                self._warm_up(session)
        else:
            metadata, folder = tf.RunMetadata(), None
            if number == self.last:
                folder = os.path.join(self.folder, f"rank_{collectives.rank()}")
            own_time = OwnTime()
            out = carry_out(_tracing(original, metadata, folder, own_time))
            end = time.perf_counter() - own_time.seconds
            self._unread.append(self._unread_run(session, run, metadata.step_stats, began, end))
            if number == self.last or not in_window:
                self._combine(session)
            elif len(self._unread) == MOST_UNREAD:
                self._read()
        self.count, self._last_ended = number, time.perf_counter()
        return out

    def finish(self) -> None:
        """Writes what is left when training is over, without the other ranks' parts."""
        self._read()
        traced_runs, self._traced = self._traced, []
        with _warns_of_errors("the profile"):
            if traced_runs:
                self._write_traces(traced_runs)
                if collectives.rank() == 0:
                    self._write_own(traced_runs)
            self._report.write_again(at_once=True)

    def _write_own(self, traced_runs: list[TracedRun]) -> None:
        """Writes the measurements of rank 0 alone."""
        steps = [traced.step for traced in traced_runs]
        own_breakdown = breakdown.combine([steps], [_mean_carried(traced_runs)])
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

    def _warm_up(self, session: Any) -> None:
        """Counts once before the first traced run: the first time takes long.

        A rank whose first time takes longer would seem to keep the others waiting in the next step.
        Therefore that step isn't traced.
        """
        with _warns_of_errors("the rows of dynamic tables"):
            _dynamic_rows(session)
        self._count_tables(session, self.count + 1)
        _global_step(session, 0)

    def _count_tables(self, session: Any, number: int) -> tuple[TableCounts, TableRates]:
        """Returns (counts, rates) of dynamic tables after run `number`, by their names."""
        counted: tuple[TableCounts, TableRates] = {}, {}
        with _warns_of_errors("the statistics of dynamic tables"):
            counted = self._table_counter.count(session, number)
        return counted

    def _unread_run(
        self, session: Any, run: PreparedRun, stats: Any, start: float, end: float
    ) -> UnreadRun:
        number = self.count + 1
        rows: dict[str, int] = {}
        with _warns_of_errors("the rows of dynamic tables"):
            rows = _dynamic_rows(session)
        return UnreadRun(
            number,
            stats,
            start if self._last_ended is None else self._last_ended,
            start,
            end,
            _global_step(session, number),
            rows,
            *self._count_tables(session, number),
            session.graph,
            run,
            SCOPES.options,
        )

    def _read(self) -> None:
        """Reads the traces of runs.

        If traces were read after each run, that would take one rank longer than another, and the
        difference would look as if the other had waited in the next run.
        """
        unread, self._unread = self._unread, []
        for source in unread:
            # This is what remains if the trace can't be read.
            times = breakdown.StepTimes(source.number, (source.end - source.start) * 1e3)
            traced = TracedRun(source, times, {}, [])
            with _warns_of_errors("the trace"):
                traced = self._measured(source)
            self._traced.append(
                dataclasses.replace(traced, source=dataclasses.replace(source, stats=None))
            )

    def _measured(self, source: UnreadRun) -> TracedRun:
        reader = self._reader(source.graph, source.run)
        spans = trace.spans(source.stats, reader.phases.of)
        counts = reader.counter.counts(trace.shapes(source.stats))
        phases = trace.time_by_phase(spans)
        phases[REST] = max(0.0, (source.end - source.start) * 1e3 - sum(phases.values()))
        phases[OUTSIDE] = (source.start - source.previous_end) * 1e3
        collective_ms: dict[str, float] = {}
        received: dict[str, int] = {}
        for span in spans:
            if graph_analysis.is_of_carrier(span.kind):
                name, ms = span.phase, (span.end - span.start) / 1e6
                collective_ms[name] = collective_ms.get(name, 0.0) + ms
                received[name] = received.get(name, 0) + span.received
        step = breakdown.StepTimes(
            source.number,
            sum(phases.values()),
            phases,
            collective_ms,
            received,
            counts.samples,
            counts.ids,
            counts.asked,
            source.dynamic_rows,
            source.table_counts,
            source.table_rates,
        )
        return TracedRun(source, step, counts.carried, spans)

    def _reader(self, graph: tf.Graph, run: PreparedRun) -> RunReader:
        if id(run) not in self._readers:
            phases, counter = Phases(graph, run.footprint), LookupCounter(graph, run.footprint)
            self._readers[id(run)] = RunReader(run, phases, counter)
        return self._readers[id(run)]

    # -- all ranks

    def _start_timeline(self) -> None:
        if hvd and collectives.size() > 1 and os.environ.get("HOROVOD_TIMELINE") == "DYNAMIC":
            with _warns_of_errors("Horovod's timeline"):
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
                "carried": _mean_carried(traced_runs),
            },
        )
        steps_by_rank = [
            [breakdown.StepTimes(**step) for step in message["steps"]] for message in messages
        ]
        combined = breakdown.combine(steps_by_rank, [message["carried"] for message in messages])
        known = graph_state.of(session.graph, KnownRuns)
        known.received_bytes = combined.received[collectives.rank()]
        known.keys_per_owner = combined.keys_per_owner
        if collectives.rank() > 0:
            return
        with _warns_of_errors("the profile"):
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

    def _write_report(self, record: dict[str, Any], traced: TracedRun, session: Any) -> None:
        """Writes split.json and the page.

        Args:
            record: the measurements.
            traced: a run that was measured.
            session: the session of the run; None if it is closed.
        """
        about: dict[str, Any] = {"ranks": collectives.size()}
        with _warns_of_errors("the plan in the profile"):
            source = traced.source
            about = circumstances(source.graph, source.run, session, source.options)
        self._report.write({**record, **about})
        _print(f"collective: {os.path.join(self.folder, PAGE)} shows this as a picture")

    def _write_traces(self, traced_runs: list[TracedRun]) -> None:
        if self._timeline:
            self._timeline = False
            with _warns_of_errors("Horovod's timeline"):
                hvd.stop_timeline()
        rank = collectives.rank()
        with _warns_of_errors("the trace"):
            events = []
            for traced in traced_runs:
                events += trace.events(traced.spans, rank, traced.step.number)
            trace.write(os.path.join(self.folder, f"rank_{rank}.trace.json"), events, rank)


def _tracing(original: Original, metadata: Any, folder: str | None, own_time: OwnTime) -> Original:
    """Returns a `Session.run` that traces.

    Args:
        original: `Session.run`.
        metadata: gets the trace.
        folder: gets TensorFlow's own profile of the run, if it is given.
        own_time: gets the time that this profile takes in addition to the run.
    """

    def traced(session: Any, fetches: Any, *feeds_options_metadata: Any) -> Any:
        if not feeds_options_metadata:  # it isn't the script's run
            return original(session, fetches)
        feeds, given_options, given_metadata = feeds_options_metadata
        options = tf.RunOptions()
        options.CopyFrom(given_options or tf.RunOptions())
        # TensorFlow's profiler would fail during a trace of more than the host, which only a script
        # asks for.
        is_full = options.trace_level > tf.RunOptions.SOFTWARE_TRACE
        with _tensorflow_profile(None if is_full else folder, own_time):
            options.trace_level = max(options.trace_level, tf.RunOptions.SOFTWARE_TRACE)
            metadata.Clear()
            out = original(session, fetches, feeds, options, metadata)
        if given_metadata is not None:
            given_metadata.CopyFrom(metadata)
        return out

    return traced


@contextlib.contextmanager
def _tensorflow_profile(folder: str | None, own_time: OwnTime) -> Iterator[None]:
    """Writes TensorFlow's profile of everything that runs inside to a folder, for TensorBoard."""
    is_on = False
    with own_time, _warns_of_errors("TensorFlow's profiler"):
        if folder is not None:
            tf2.profiler.experimental.start(folder)
            is_on = True
    try:
        yield
    finally:
        with own_time, _warns_of_errors("TensorFlow's profiler"):
            if is_on:
                tf2.profiler.experimental.stop()


def _mean_carried(traced_runs: list[TracedRun]) -> breakdown.Carried:
    """Returns the mean over runs of what exchanges carried."""
    means: breakdown.Carried = {}
    for traced in traced_runs:
        for subject, counts_by_table in traced.carried.items():
            means_by_table = means.setdefault(subject, {})
            for table, counts in counts_by_table.items():
                sums = means_by_table.setdefault(table, [0.0] * len(counts))
                for i, count in enumerate(counts):
                    sums[i] += count / len(traced_runs)
    return means


def _dynamic_rows(session: Any) -> dict[str, int]:
    """Counts the rows on this rank of the dynamic tables that `session` has, by their names."""
    variables = session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    tables = [variable for variable in variables if isinstance(variable, DynamicTable)]
    try:
        counts = local_counts(session, tables)
    except (tf.errors.OpError, RuntimeError):  # Some aren't initialized.
        return {}
    return {table.op.name: count for table, count in zip(tables, counts)}


def _global_step(session: Any, number: int) -> int:
    try:
        step = tf.train.get_global_step(session.graph)
        return number if step is None else int(run_unpatched(session, step))
    # There is none that can be read.
    except (tf.errors.OpError, RuntimeError, TypeError, ValueError):
        return number


@contextlib.contextmanager
def _warns_of_errors(what: str) -> Iterator[None]:
    """Turns an error inside it into a warning: the ranks continue training together."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)


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
