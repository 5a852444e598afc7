"""What rank 0 says while training goes on: its speed and loss on stderr, the scores of each
evaluation on stdout.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import tensorflow.compat.v1 as tf


class Progress(tf.train.SessionRunHook):
    """A line at every tenth of the way. The samples are all ranks' together, in the time since the
    first step, that of evaluations included; the loss is rank 0's own.
    """

    def __init__(self, loss: tf.Tensor, steps: int, batch: int, rank: int):
        self._loss, self._steps, self._batch, self._silent = loss, steps, batch, rank != 0

    def after_create_session(self, session: tf.Session, coordinator: Any) -> None:
        self._step, self._counted, self._losses = (
            int(session.run(tf.train.get_global_step())),
            0,
            [],
        )

    def before_run(self, context: Any) -> tf.train.SessionRunArgs:
        return tf.train.SessionRunArgs(self._loss)  # on every rank: ranks fetch alike

    def after_run(self, context: Any, values: Any) -> None:
        self._step += 1
        self._counted += 1
        self._losses.append(values.results)
        if self._counted == 1:
            # the first step also starts the machinery: it doesn't count for the rate
            self._started = time.monotonic()
        tenth = self._step * 10 // self._steps
        if tenth == (self._step - 1) * 10 // self._steps or self._silent:
            return
        seconds = time.monotonic() - self._started
        rate = f"{(self._counted - 1) * self._batch / seconds:,.0f}" if self._counted > 1 else "-"
        mean = sum(self._losses) / len(self._losses)
        print(
            f"step {self._step}/{self._steps}  {rate} samples/s  loss {mean:.4f} (rank 0)",
            file=sys.stderr,
            flush=True,
        )
        self._losses.clear()


class Scores(tf.estimator.Exporter):
    """Says the scores of each evaluation; exports nothing."""

    name = "scores"

    def __init__(self, ratings: int, say: Any):
        self._ratings, self._say = ratings, say

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: dict,
        is_the_final_export: bool,
    ) -> None:
        self._say(line(eval_result, self._ratings))


def line(metrics: dict, ratings: int) -> str:
    return (
        f"test AUC {metrics['auc']:.4f}  log loss {metrics['log_loss']:.4f}  ({ratings} "
        f"ratings, after step "
        f"{metrics['global_step']})"
    )
