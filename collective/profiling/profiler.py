"""Measures some of the training runs of this process, the same ones on every rank, and says where
their time went.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, Callable

import horovod.tensorflow as hvd
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination import barrier
from collective.coordination.prepared_run import PreparedRun
from collective.ops import collectives, graph_analysis
from collective.ops.graph_state import state_of
from collective.ops.sessions import run_unpatched
from collective.options import ScopeOptions
from collective.profiling import breakdown, trace
from collective.profiling.lookup_counts import Counting
from collective.profiling.phases import Phases
from collective.profiling.summaries import Writer

Original = Callable[..., Any]


@dataclasses.dataclass
class Traced:
    """A training run that was traced.

    Attributes:
        step: what was measured.
        spans: what ran.
        global_step: the graph's, after it; the number of the run if there is none.
    """

    step: breakdown.Step
    spans: list[trace.Span]
    global_step: int


class Profiler:
    """Traces training runs `first` to `last` of this process, and every `every`-th; 1 is the first.
    0: none of these.

    Ranks measure the same runs, and meet behind the last of them to put their measurements
    together. In `folder` every rank writes rank_<r>.trace.json, for chrome://tracing or Perfetto,
    and into rank_<r>/, for TensorBoard, TensorFlow's own profile of the last one; rank 0 writes
    split.json, scalars for TensorBoard and, where Horovod lets it, Horovod's timeline.
    """

    def __init__(self, folder: str, first: int, last: int, every: int):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.first, self.last, self.every = folder, first, last, every
        self.count = 0
        self._left: float | None = None  # when the last training run ended
        self._traced: list[Traced] = []
        # of running the graph, by the identity of the first
        self._ways: dict[int, tuple[Any, Phases, Counting]] = {}
        self._writer: Writer | None = None
        self._timeline = False

    def watch(
        self,
        original: Original,
        session: Any,
        run: PreparedRun,
        carry_out: Callable[[Original], Any],
    ) -> Any:
        """Carries out a training run, and measures it if it is one of those to be measured.

        Args:
            original: `Session.run`.
            session: the session.
            run: what is carried out.
            carry_out: does it by what takes the place of `original`.
        """
        number = self.count + 1
        inside = self.first <= number <= self.last
        if number == self.first and not self._timeline:
            self._start_timeline()
        began = time.perf_counter()
        if not (inside or self.every and number % self.every == 0):
            out = carry_out(original)
        else:
            metadata = tf.RunMetadata()
            own = (
                os.path.join(self.folder, f"rank_{collectives.rank()}")
                if number == self.last
                else None
            )
            out = carry_out(_tracing(original, metadata, own))
            ended = time.perf_counter()
            # should the trace be none to understand
            traced = Traced(breakdown.Step(number, (ended - began) * 1e3), [], number)
            with _unharmed("the trace"):
                traced = self._measured(session, run, metadata.step_stats, began, ended)
            self._traced.append(traced)
            if number == self.last or not inside:
                self._tell(session)
        self.count, self._left = number, time.perf_counter()
        return out

    def finish(self) -> None:
        """Training is over: what is left is written, though nobody is there to put it together
        with.
        """
        if self._traced:
            self._write_traces(self._traced)
            if collectives.rank() == 0:
                _say(
                    breakdown.text(breakdown.join([[t.step for t in self._traced]]), [0])
                    + f"\n(of rank "
                    f"0 alone: "
                    f"training "
                    f"ended "
                    f"before step {self.last})"
                )
            self._traced = []

    # -- one run

    def _measured(
        self, session: Any, run: PreparedRun, stats: Any, began: float, ended: float
    ) -> Traced:
        _, phases, counting = self._way(session.graph, run)
        ran = trace.spans(stats, phases.of)
        counts = counting.of(trace.shapes(stats))
        took = trace.split(ran)
        took[breakdown.REST] = max(0.0, (ended - began) * 1e3 - sum(took.values()))
        took[breakdown.OUTSIDE] = (began - (began if self._left is None else self._left)) * 1e3
        collectives: dict[str, float] = {}
        received: dict[str, int] = {}
        for span in ran:
            if graph_analysis.is_horovod(span.kind):
                collectives[span.phase] = (
                    collectives.get(span.phase, 0.0) + (span.end - span.start) / 1e6
                )
                received[span.phase] = received.get(span.phase, 0) + span.received
        return Traced(
            breakdown.Step(
                self.count + 1, sum(took.values()), took, collectives, received, *counts
            ),
            ran,
            _global_step(session, self.count + 1),
        )

    def _way(self, graph: tf.Graph, run: PreparedRun) -> tuple[Any, Phases, Counting]:
        if id(run) not in self._ways:
            # `run` keeps its identity
            self._ways[id(run)] = (
                run,
                Phases(graph, run.footprint),
                Counting(graph, run.footprint),
            )
        return self._ways[id(run)]

    # -- all ranks

    def _start_timeline(self) -> None:
        if collectives.size() > 1 and os.environ.get("HOROVOD_TIMELINE") == "DYNAMIC":
            with _unharmed("Horovod's timeline"):
                hvd.start_timeline(os.path.join(self.folder, "horovod.json"))
                self._timeline = True

    def _tell(self, session: Any) -> None:
        """All ranks' measurements are put together, and written."""
        traced, self._traced = self._traced, []
        numbers = [t.step.number for t in traced]
        window = self.last in numbers
        if window:
            self._write_traces(traced)
        told = barrier.exchange(
            session,
            f"puts together the profile of steps {numbers[0]} to {numbers[-1]}",
            {"steps": [dataclasses.asdict(t.step) for t in traced]},
        )
        steps = [[breakdown.Step(**step) for step in rank["steps"]] for rank in told]
        joined = breakdown.join(steps)
        state_of(session.graph).received_bytes = joined.received[collectives.rank()]
        state_of(session.graph).keys_per_owner = joined.keys_per_owner
        if collectives.rank() > 0:
            return
        with _unharmed("the profile"):
            if window:
                _say(breakdown.text(joined, range(len(told))))
                with open(os.path.join(self.folder, "split.json"), "w", encoding="utf-8") as file:
                    json.dump(
                        {**joined.to_dict(), "of_steps": [rank["steps"] for rank in told]}, file
                    )
            self._writer = self._writer or Writer(self.folder)
            for i, t in enumerate(traced):
                self._writer.add(breakdown.join([[rank[i]] for rank in steps]), t.global_step)

    def _write_traces(self, traced: list[Traced]) -> None:
        if self._timeline:
            self._timeline = False
            with _unharmed("Horovod's timeline"):
                hvd.stop_timeline()
        rank = collectives.rank()
        with _unharmed("the trace"):
            trace.write(
                os.path.join(self.folder, f"rank_{rank}.trace.json"),
                [event for t in traced for event in trace.events(t.spans, rank, t.step.number)],
                rank,
            )


def _tracing(original: Original, metadata: Any, folder: str | None) -> Original:
    """`Session.run` that traces a run with options, which is how the user's is carried out; its
    profile goes to `folder`.
    """

    def traced(session: Any, fetches: Any, *rest: Any) -> Any:
        if not rest:
            return original(session, fetches)
        feeds, options, theirs = rest
        ours = tf.RunOptions()
        ours.CopyFrom(options or tf.RunOptions())
        # A trace that the user asked for, of more than the host, would fail beside TensorFlow's
        # profiler.
        with _own_profile(None if ours.trace_level > tf.RunOptions.SOFTWARE_TRACE else folder):
            ours.trace_level = max(ours.trace_level, tf.RunOptions.SOFTWARE_TRACE)
            metadata.Clear()
            out = original(session, fetches, feeds, ours, metadata)
        if theirs is not None:
            theirs.CopyFrom(metadata)
        return out

    return traced


@contextlib.contextmanager
def _own_profile(folder: str | None) -> Iterator[None]:
    """TensorFlow's profile of what runs inside, for TensorBoard."""
    on = False
    with _unharmed("TensorFlow's profiler"):
        if folder is not None:
            tf2.profiler.experimental.start(folder)
            on = True
    try:
        yield
    finally:
        with _unharmed("TensorFlow's profiler"):
            if on:
                tf2.profiler.experimental.stop()


def _global_step(session: Any, number: int) -> int:
    try:
        step = tf.train.get_global_step(session.graph)
        return number if step is None else int(run_unpatched(session, step))
    # there is none that can be read
    except (tf.errors.OpError, RuntimeError, TypeError, ValueError):
        return number


@contextlib.contextmanager
def _unharmed(what: str) -> Iterator[None]:
    """What fails inside is a warning: the ranks go on training together."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)


def _say(text: str) -> None:
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
    """The outermost scope() ends."""
    for profiler in _profilers.values():
        profiler.finish()
