"""Measures a training run every ten seconds, for the metrics of a job.

    runs     1 … 8    9        10         11 …        the first after 10 s by rank 0's clock
                      counts   measured               measured
                      rows

Ranks measure the same runs: the tenth, and then one after each ten seconds of rank 0's clock, which
they know from the agreement before each run. After such a run they meet once. Any other run costs a
comparison of two numbers.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.coordination.clock import Clock
from collective.coordination.prepared_run import PreparedRun
from collective.job import metrics_address
from collective.monitoring import job_metrics
from collective.ops.communication import collectives
from collective.profiling import breakdown
from collective.profiling.owner_balance import BalanceWarning
from collective.profiling.run_tracer import Original, RunTracer, UnreadRun, mean_carried
from collective.tables.dynamic_table import DynamicTable
from collective.tables.table import Table

FIRST = 10  # the first run that is measured; before it TensorFlow prepares its own work
PERIOD = 10.0  # seconds between two of them


class StepMeter:
    """Measures some training runs of this process."""

    def __init__(self) -> None:
        self._tracer, self._clock = RunTracer(), Clock()
        self._balance = BalanceWarning()
        self._count = self._counted = 0  # how many runs there were; by the last measurement
        self._is_due = False
        self._agreed = 0.0  # rank 0's clock at the last measurement
        # The run from whose end on the rate is taken, and when it ended.
        self._since = 0, time.perf_counter()

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
        number = self._count + 1
        if self._is_due:
            out, unread = self._tracer.trace(original, session, run, carry_out, number)
            self._combine(session, unread)
        else:
            out = carry_out(original)
            if number == FIRST - 2:
                self._tracer.warm_up(session, number)
        self._count = number
        if number == 1:
            # The first run also starts the machinery: it doesn't count for the rate.
            self._since = 1, time.perf_counter()
        is_first = number == FIRST - 1
        self._is_due = is_first or number >= FIRST and self._clock.time() >= self._agreed + PERIOD
        self._tracer.has_run()
        return out

    def _combine(self, session: Any, unread: UnreadRun) -> None:
        """Combines all ranks' measurements of a run."""
        traced, metrics = self._tracer.read(unread), job_metrics.metrics()
        number = unread.number
        messages = barrier.exchange(
            session,
            f"puts together the metrics of step {number}",
            {
                "step": dataclasses.asdict(traced.step),
                "carried": mean_carried([traced]),
                "losses": metrics.take_losses(),
            },
        )
        self._agreed = self._clock.time()
        steps, self._counted = number - self._counted, number
        (first, began), self._since = self._since, (number, time.perf_counter())
        rate = (number - first) / max(self._since[1] - began, 1e-9)
        if collectives.rank() > 0:
            return
        combined = breakdown.combine(
            [[breakdown.StepTimes(**message["step"])] for message in messages],
            [message["carried"] for message in messages],
        )
        metrics.static_rows = _static_rows(session.graph)
        metrics.measured(combined, steps, rate)
        self._balance.look(session.graph, combined.keys_per_owner)
        losses, count = (sum(values) for values in zip(*(m["losses"] for m in messages)))
        if count:
            metrics.loss = losses / count


class LossHook(tf.train.SessionRunHook):
    """Tells the metrics of a job the loss that an Estimator trains."""

    def begin(self) -> None:
        # An Estimator puts it there, last.
        self._loss = tf.get_collection(tf.GraphKeys.LOSSES)[-1]

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._loss)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        job_metrics.metrics().add_loss(float(run_values.results))


def _static_rows(graph: tf.Graph) -> dict[str, int]:
    """Returns the rows of a graph's static tables, by their names."""
    variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    return {
        variable.op.name: int(variable.shape[0])
        for variable in variables
        if isinstance(variable, Table) and not isinstance(variable, DynamicTable)
    }


_meters: dict[int, StepMeter] = {}


def of_process() -> StepMeter | None:
    """Returns the meter of this process; None if the job serves no metrics."""
    if not os.environ.get(metrics_address.VARIABLE):  # as job_metrics.is_on(), before every run
        return None
    made = _meters.get(os.getpid())
    if made is None:
        made = _meters[os.getpid()] = StepMeter()
    return made
