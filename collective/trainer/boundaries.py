"""Acts at the boundaries of a schedule: validate, save, report, then stop, on all ranks alike.

    a step ──▶ boundary? ──▶ save ──▶ validate what was saved ──▶ report ──▶ meet: does a rank stop?

A validation evaluates a checkpoint, so a step that is validated is saved, too. The ranks meet once
at a boundary: there they exchange their losses, and the wish to stop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.coordination.clock import Clock
from collective.trainer.record import TrainingRecord
from collective.trainer.reports import Reports
from collective.trainer.schedule import Boundary, Schedule

BASENAME = "model.ckpt"  # an Estimator's
OnValidation = Callable[[int, Mapping[str, Any]], object]


class Validator:
    """Evaluates checkpoints of a training, and keeps their metrics in its record.

    Args:
        estimator: of the training.
        input_fn: of the data to validate with.
        batches: how many of the first batches to use; None: all.
        record: of the training.
        reports: shows the metrics.
        on_validation: is told the metrics.
    """

    def __init__(
        self,
        estimator: Any,
        input_fn: Callable[..., Any],
        batches: int | None,
        record: TrainingRecord,
        reports: Reports,
        on_validation: OnValidation | None,
    ):
        self._estimator, self._input_fn, self._batches = estimator, input_fn, batches
        self._record, self._reports, self._on_validation = record, reports, on_validation

    def __call__(self, checkpoint: str, step: int) -> None:
        """Validates the checkpoint of a step. Every rank calls it."""
        metrics = self._estimator.evaluate(
            self._input_fn, self._batches, checkpoint_path=checkpoint
        )
        self._record.validated(step, metrics)
        self._reports.validated(step, self._record.seconds.get(step, 0.0), metrics)
        told = self._on_validation
        if told is not None:
            barrier.run_on_all_ranks(
                None, f"on_validation after step {step}", lambda: bool(told(step, metrics))
            )


class Elapsed:
    """Counts seconds of training by rank 0's clock, with those before a restart."""

    def __init__(self) -> None:
        self._clock, self._begun, self.before = Clock(), 0.0, 0.0

    def begin(self, before: float) -> None:
        """Starts to count, from `before` seconds on."""
        self.before, self._begun = before, self._clock.time()

    def now(self) -> float:
        """Returns the seconds."""
        return self.before + max(0.0, self._clock.time() - self._begun)


class BoundaryHook(tf.train.CheckpointSaverHook):
    """Saves at the boundaries of a schedule, where TensorFlow's hook saves every so many steps.

    Attributes:
        reports: the training losses at the boundaries that report.
        wants_stop: whether this rank wants all ranks to stop at the next boundary.
        has_stopped: whether they have.

    Args:
        folder: of the checkpoints.
        schedule: says when.
        record: is kept with the checkpoints.
        validator: evaluates checkpoints; None: there is nothing to validate with.
        shown: shows the reports.
        validates_first: whether to validate before the first step, if nothing was validated yet.
    """

    def __init__(
        self,
        folder: str,
        schedule: Schedule,
        record: TrainingRecord,
        validator: Validator | None,
        shown: Reports,
        validates_first: bool,
    ):
        super().__init__(
            folder, save_steps=1, checkpoint_basename=BASENAME, listeners=[_Keeper(self)]
        )
        self.reports: list[dict[str, Any]] = []
        self.wants_stop = self.has_stopped = False
        self._folder, self._schedule, self._record = folder, schedule, record
        self._validator, self._validates_first = validator, validates_first
        self._shown = shown
        self._elapsed, self._step, self._now = Elapsed(), 0, 0.0
        self._losses = self._runs = 0.0
        self._at: Boundary | None = None

    def begin(self) -> None:
        super().begin()
        self._counted = tf.train.get_global_step()
        # An Estimator puts the loss that it trains there, last.
        self._loss = tf.get_collection(tf.GraphKeys.LOSSES)[-1]

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._step = int(session.run(self._counted))
        self._record.restore_generators(self._step)
        self._elapsed.begin(self._record.seconds.get(self._step, 0.0))
        self._now = self._elapsed.now()
        self._shown.begin(self._step, self._now)
        # It saves this step. If the job died between this checkpoint and its validation, that is
        # made up for.
        self._at = self._first_boundary()
        super().after_create_session(session, coord)
        self._at = None

    def _first_boundary(self) -> Boundary | None:
        if not self._step:
            first = self._validates_first and not self._record.validations
            return Boundary(0, validates=first)
        return self._schedule.boundary(self._step, self._now, self._now)

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._loss)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._step += 1
        self._losses, self._runs = self._losses + float(run_values.results), self._runs + 1
        before, self._now = self._now, self._elapsed.now()
        self._shown.step()
        boundary = self._schedule.boundary(self._step, before, self._now)
        if boundary.is_empty:
            return
        session = run_context.session
        self._check_step(int(session.run(self._counted)))
        self._at = boundary
        if boundary.saves or boundary.validates and self._validator is not None:
            self._timer.update_last_triggered_step(self._step)
            with self._shown.throughput.pause():
                self._save(session, self._step)
        self._at = None
        if self._meet(boundary) or boundary.ends:
            run_context.request_stop()

    def _check_step(self, counted: int) -> None:
        if counted != self._step:
            raise ValueError(
                f"after global batch {self._step} the global step is {counted}. A Trainer counts "
                "a step for each batch: let train_op raise it by 1, once, and leave "
                "scope(local_steps=…) out."
            )

    def _meet(self, boundary: Boundary) -> bool:
        """Reports the mean loss since the last report; returns whether a rank stops."""
        mine = {
            "loss": self._losses,
            "runs": self._runs,
            "stop": self.wants_stop,
            "samples_per_s": self._shown.throughput.now(),
        }
        messages = barrier.exchange(None, f"the boundary after step {self._step}", mine)
        if boundary.reports and self._runs:
            losses = [message["loss"] / message["runs"] for message in messages]
            self._report(sum(losses) / len(losses), messages[0]["samples_per_s"])
        self.has_stopped = any(message["stop"] for message in messages)
        return self.has_stopped

    def _report(self, loss: float, samples_per_s: float | None) -> None:
        self._losses = self._runs = 0.0
        self._shown.throughput.restart()
        report = {
            "step": self._step,
            "loss": loss,
            "samples_per_s": samples_per_s,
            "seconds": self._now,
        }
        epochs = self._schedule.epochs(self._step)
        if epochs is not None:
            report["epochs"] = epochs
        self.reports.append(report)
        self._shown.report(report)

    # -- called around a save

    def before_checkpoint(self, step: int) -> None:
        self._record.before_checkpoint(int(step), self._elapsed.now())

    def after_checkpoint(self, step: int) -> None:
        """Validates the checkpoint that was saved, if its boundary says so."""
        boundary = self._at
        if boundary is None or not boundary.validates or self._validator is None:
            return
        if int(step) not in self._record.validations:
            self._validator(os.path.join(self._folder, f"{BASENAME}-{step}"), int(step))


class _Keeper(tf.train.CheckpointSaverListener):
    """Tells a hook of its own saves."""

    def __init__(self, hook: BoundaryHook):
        self._hook = hook

    def before_save(self, session: Any, global_step_value: Any) -> None:
        self._hook.before_checkpoint(global_step_value)

    def after_save(self, session: Any, global_step_value: Any) -> None:
        self._hook.after_checkpoint(global_step_value)
