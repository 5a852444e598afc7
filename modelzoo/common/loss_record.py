"""Records the course of the loss in a file, which loss_curve.py draws."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

POINTS = 100  # of a training


class LossRecord:
    """Writes lines 'step <tab> loss' on rank 0: means of a hundredth of the training.

    The loss is rank 0's own.

    Args:
        path: of the file, which is overwritten; None: nothing is recorded.
        steps: how many steps there are, the finished ones included.
        rank: this process's rank.
        finished: how many steps were taken before.
    """

    def __init__(self, path: str | None, steps: int, rank: int, finished: int = 0):
        self._path = path if rank == 0 else None
        self._every = max(1, steps // POINTS)
        self._step = finished
        self._losses: list[float] = []
        if self._path:
            open(self._path, "w").close()

    def step(self, loss: float) -> None:
        self._step += 1
        if self._path is None:
            return
        self._losses.append(loss)
        if self._step % self._every == 0:
            with open(self._path, "a") as file:
                file.write(f"{self._step}\t{sum(self._losses) / len(self._losses):.6f}\n")
            self._losses.clear()


class LossRecordHook(tf.train.SessionRunHook):
    """Records the loss of an Estimator's training."""

    def __init__(self, record: LossRecord, loss: tf.Tensor):
        self._record, self._loss = record, loss

    def before_run(self, context: Any) -> tf.train.SessionRunArgs:
        return tf.train.SessionRunArgs(self._loss)  # on every rank: ranks fetch alike

    def after_run(self, context: Any, values: Any) -> None:
        self._record.step(float(values.results))
