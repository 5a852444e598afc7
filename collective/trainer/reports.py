"""Shows what a training reports, on rank 0: everywhere that shows it.

    a report      TensorBoard, metrics.jsonl, the log, Prometheus, Kubeflow's TrainJob
    a validation  metrics.jsonl, Kubeflow's TrainJob (TensorBoard and Prometheus: by the Estimator)
    a step        the progress bar, on a terminal

Ranks have exchanged what is reported at a boundary; nothing here exchanges anything. What can't be
written is a warning, once: training is worth more than its record.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.integrations import kubeflow
from collective.monitoring import job_metrics
from collective.monitoring.job_metrics import number_of
from collective.ops.communication import collectives
from collective.trainer import progress_bar
from collective.trainer.metrics_file import MetricsFile
from collective.trainer.progress_bar import ProgressBar
from collective.trainer.schedule import Schedule


class Throughput:
    """Measures the records per second of training, validations and saves left out.

    Args:
        batch: the records of a global batch.
    """

    def __init__(self, batch: int):
        self._batch, self._steps, self._paused = batch, 0, 0.0
        self._since: float | None = None

    def step(self) -> None:
        """Counts a step; the first one also starts the machinery, and doesn't count."""
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self._steps += 1

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out the time inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def now(self) -> float | None:
        """Returns the records per second since `restart`; None before there are two steps."""
        if self._since is None or not self._steps:
            return None
        seconds = time.perf_counter() - self._since - self._paused
        return self._steps * self._batch / seconds if seconds > 0 else None

    def restart(self) -> None:
        """Begins to measure from now on, if training has begun."""
        if self._steps:
            self._since, self._steps, self._paused = time.perf_counter(), 0, 0.0


class Reports:
    """Shows reports and validations of a training in a folder; on other ranks than 0 nothing.

    Attributes:
        throughput: of this process's training.

    Args:
        folder: of the checkpoints.
        schedule: of the training.
    """

    def __init__(self, folder: str, schedule: Schedule):
        self.throughput = Throughput(schedule.batch)
        self._folder, self._schedule = folder, schedule
        self._file: MetricsFile | None = None
        self._bar: ProgressBar | None = None
        self._status: kubeflow.TrainerStatus | None = None
        self._known: dict[str, float | None] = {}  # the newest metrics
        self._began: tuple[int, float] | None = None  # the step, and seconds
        self._is_warned = False

    def begin(self, step: int, seconds: float) -> None:
        """Begins to show a training, at a step and after so many seconds of training."""
        job_metrics.metrics().global_batch = self._schedule.batch
        if collectives.rank() > 0:
            return
        self._began = step, seconds
        self._file = MetricsFile(self._folder)
        self._safely(lambda: self._file.begin(step))  # type: ignore[union-attr]
        if progress_bar.is_on_terminal():
            self._bar = ProgressBar(self._schedule.last_step, step)
        self._status = kubeflow.trainer_status()
        self._tell(step, seconds)

    def step(self) -> None:
        """Counts a step."""
        self.throughput.step()
        if self._bar is not None:
            self._bar.step(self.throughput.now(), self._known.get("training_loss"))

    def report(self, report: Mapping[str, Any]) -> None:
        """Shows a report: step, loss, seconds, samples_per_s and, if they are known, epochs."""
        if collectives.rank() > 0:
            return
        step, loss, rate = report["step"], report["loss"], report["samples_per_s"]
        job_metrics.metrics().loss = loss
        epochs = report.get("epochs")
        of_epochs = "" if epochs is None else f" (epoch {epochs:.2f})"
        of_rate = "" if rate is None else f", {rate:,.0f} samples/s"
        tf.logging.info(f"step {step}{of_epochs}: loss {loss:.6g}{of_rate}")
        metrics = {"loss": loss, "samples_per_s": rate}
        values = [
            tf.Summary.Value(tag=f"trainer/{name}", simple_value=value)
            for name, value in metrics.items()
            if value is not None
        ]
        writer = tf.summary.FileWriterCache.get(self._folder)
        writer.add_summary(tf.Summary(value=values), step)
        writer.flush()  # else it is seen minutes later, or when the process ends
        about = {name: report[name] for name in ("seconds", "epochs") if name in report}
        self._add("training", step, metrics, about)
        # `loss` is the validation's: that of the best checkpoint, or of a search.
        self._known.update(training_loss=loss, samples_per_s=rate)
        self._tell(step, report["seconds"])

    def validated(self, step: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of a validation."""
        if collectives.rank() > 0:
            return
        self._add("validation", step, metrics, {})
        for name, value in metrics.items():
            if name != "global_step":
                self._known[name] = number_of(value)
        self._tell(step, seconds)

    def close(self) -> None:
        """Ends the bar, and whatever else has begun."""
        job_metrics.metrics().global_batch = None
        if self._bar is not None:
            self._bar.close()
        if self._status is not None:
            self._status.close()

    def _add(
        self, kind: str, step: int, metrics: Mapping[str, Any], about: Mapping[str, Any]
    ) -> None:
        file = self._file or MetricsFile(self._folder)
        now = round(time.time(), 3)
        self._safely(lambda: file.add(kind, metrics, step=step, time=now, **about))

    def _safely(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, tf.errors.OpError) as error:
            if not self._is_warned:
                warnings.warn(
                    f"metrics of the training in '{self._folder}' can't be written: "
                    f"{type(error).__name__}: {error}. Training goes on without them.",
                    RuntimeWarning,
                    stacklevel=3,
                )
            self._is_warned = True

    def _tell(self, step: int, seconds: float) -> None:
        """Tells Kubeflow how far training is."""
        if self._status is None or self._began is None:
            return
        whole, remaining = self._schedule.last_step, None
        if whole is None:
            share, remaining = self._schedule.share_of_time(seconds)
        else:
            share = step / whole
            steps, took = step - self._began[0], seconds - self._began[1]
            if steps > 0:
                remaining = took / steps * (whole - step)
        self._status.tell(share, remaining, self._known)
