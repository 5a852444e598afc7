"""Traces single training runs, and reads the traces: what `Profiler` and metrics measure with."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination.prepared_run import PreparedRun
from collective.ops.graph import graph_analysis
from collective.ops.graph.sessions import run_unpatched
from collective.options import ScopeOptions
from collective.profiling import breakdown, trace
from collective.profiling.lookup_counts import LookupCounter
from collective.profiling.phases import Phases
from collective.profiling.report.phases import OUTSIDE, REST
from collective.profiling.table_counter import TableCounter, TableCounts, TableRates
from collective.scope import SCOPES
from collective.tables.dynamic_table import DynamicTable
from collective.tables.rows.row_store import local_counts

Original = Callable[..., Any]


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


class RunTracer:
    """Traces some training runs of this process, and tells what they did."""

    def __init__(self) -> None:
        self._last_ended: float | None = None  # when the last training run ended
        self._table_counter = TableCounter()
        self._readers: dict[int, RunReader] = {}  # by the identity of the run

    def has_run(self) -> None:
        """Notes the end of a training run, traced or not."""
        self._last_ended = time.perf_counter()

    def warm_up(self, session: Any, number: int) -> None:
        """Counts once before the first traced run: the first time takes long.

        A rank whose first time takes longer would seem to keep the others waiting in the next step.
        Therefore that step isn't traced.

        Args:
            session: the session.
            number: of the run that has just ended.
        """
        with warns_of_errors("the rows of dynamic tables"):
            _dynamic_rows(session)
        self._count_tables(session, number)
        _global_step(session, 0)

    def trace(
        self,
        original: Original,
        session: Any,
        run: PreparedRun,
        carry_out: Callable[[Original], Any],
        number: int,
        folder: str | None = None,
    ) -> tuple[Any, UnreadRun]:
        """Carries out a run, and traces it.

        Args:
            original: `Session.run`.
            session: the session.
            run: the run.
            carry_out: carries it out, given a replacement of `original`.
            number: of the run.
            folder: gets TensorFlow's own profile of the run, if it is given.

        Returns:
            (the values of the run, its trace).
        """
        began = time.perf_counter()
        metadata, own_time = tf.RunMetadata(), OwnTime()
        out = carry_out(_tracing(original, metadata, folder, own_time))
        end = time.perf_counter() - own_time.seconds
        return out, self._unread_run(session, run, number, metadata.step_stats, began, end)

    def _count_tables(self, session: Any, number: int) -> tuple[TableCounts, TableRates]:
        """Returns (counts, rates) of dynamic tables after run `number`, by their names."""
        counted: tuple[TableCounts, TableRates] = {}, {}
        with warns_of_errors("the statistics of dynamic tables"):
            counted = self._table_counter.count(session, number)
        return counted

    def _unread_run(
        self,
        session: Any,
        run: PreparedRun,
        number: int,
        stats: Any,
        start: float,
        end: float,
    ) -> UnreadRun:
        rows: dict[str, int] = {}
        with warns_of_errors("the rows of dynamic tables"):
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

    def read(self, source: UnreadRun) -> TracedRun:
        """Reads the trace of a run, which takes milliseconds."""
        # This is what remains if the trace can't be read.
        times = breakdown.StepTimes(source.number, (source.end - source.start) * 1e3)
        traced = TracedRun(source, times, {}, [])
        with warns_of_errors("the trace"):
            traced = self._measured(source)
        return dataclasses.replace(traced, source=dataclasses.replace(source, stats=None))

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
            counts.table_ids,
            counts.table_distinct,
        )
        return TracedRun(source, step, counts.carried, spans)

    def _reader(self, graph: tf.Graph, run: PreparedRun) -> RunReader:
        if id(run) not in self._readers:
            phases, counter = Phases(graph, run.footprint), LookupCounter(graph, run.footprint)
            self._readers[id(run)] = RunReader(run, phases, counter)
        return self._readers[id(run)]


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
    with own_time, warns_of_errors("TensorFlow's profiler"):
        if folder is not None:
            tf2.profiler.experimental.start(folder)
            is_on = True
    try:
        yield
    finally:
        with own_time, warns_of_errors("TensorFlow's profiler"):
            if is_on:
                tf2.profiler.experimental.stop()


def mean_carried(traced_runs: list[TracedRun]) -> breakdown.Carried:
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
def warns_of_errors(what: str) -> Iterator[None]:
    """Turns an error inside it into a warning: the ranks continue training together."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
