"""Holds the newest numbers of a job on rank 0, of all ranks together, for Prometheus.

    a training run now and then (`step_meter`)    samples, times, bytes and rows of a step; the loss
    a Trainer's report; an evaluation             the loss; metrics
    this process's milestones                     steps, saves

Only the first costs an exchange, every ten seconds. A scrape computes nothing: it reads what is
there, in a thread of its own, also while a run waits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from collective.job import metrics_address
from collective.profiling.breakdown import Breakdown


class JobMetrics:
    """Holds the numbers. Rank 0 fills it, and Prometheus reads it in another thread.

    Attributes:
        loss: the mean loss of all ranks since the value before; None if nobody has told it.
        global_batch: the samples of a step, where that is known; else they are counted.
        samples: that all ranks have trained on in this process, as of the last measurement.
        samples_per_s: of all ranks, between the last two measurements; None before.
        breakdown: of the last step that was measured; None before.
        static_rows: of tables whose number of rows is fixed, by name.
        evaluations: metrics, by evaluation and name.
    """

    def __init__(self) -> None:
        self.loss: float | None = None
        self.global_batch: int | None = None
        self.samples = 0.0
        self.samples_per_s: float | None = None
        self.breakdown: Breakdown | None = None
        self.static_rows: dict[str, int] = {}
        self.evaluations: dict[tuple[str, str], float] = {}
        self._losses: list[float] = [0.0, 0]

    def add_loss(self, loss: float) -> None:
        """Adds the loss of a step of this rank, on any rank."""
        self._losses = [self._losses[0] + loss, self._losses[1] + 1]

    def take_losses(self) -> list[float]:
        """Returns [sum, count] of the losses of this rank since the last call."""
        losses, self._losses = self._losses, [0.0, 0]
        return losses

    def evaluated(self, evaluation: str | None, metrics: Mapping[str, Any]) -> None:
        """Takes over the metrics of an evaluation, which are the same on all ranks.

        Args:
            evaluation: its name; None: it has none.
            metrics: by name; what isn't one number is left out.
        """
        found = {(evaluation or "", n): number_of(value) for n, value in metrics.items()}
        numbers = {key: value for key, value in found.items() if value is not None}
        self.evaluations = {**self.evaluations, **numbers}

    def measured(self, breakdown: Breakdown, steps: int, rate: float) -> None:
        """Takes over the measurements of a step.

        Args:
            breakdown: of the step.
            steps: how many steps there were since the last measurement.
            rate: steps per second since then, with everything between them.
        """
        self.breakdown = breakdown
        samples = self.global_batch or breakdown.samples
        if samples is not None:
            self.samples += samples * steps
            self.samples_per_s = samples * rate


def number_of(value: Any) -> float | None:
    """Returns a metric as a number; None if it isn't one, such as a summary."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if isinstance(value, (str, bytes)) else number


_metrics: dict[int, JobMetrics] = {}


def is_on() -> bool:
    """Tells whether the job serves metrics."""
    return bool(os.environ.get(metrics_address.VARIABLE))


def metrics() -> JobMetrics:
    """Returns those of this process."""
    made = _metrics.get(os.getpid())
    if made is None:
        made = _metrics[os.getpid()] = JobMetrics()
    return made
