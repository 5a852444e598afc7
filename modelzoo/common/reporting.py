"""Reports of a training program, on rank 0 only: lines on stdout, progress on stderr.

Progress is a bar on a terminal, and a plain line at every tenth of the way elsewhere.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
from tqdm import tqdm

from common.command_line import TrainingOptions
from common.counting import counted


def reporter(rank: int) -> Callable[[str], None]:
    """Returns a function that prints a line on rank 0, and nothing on other ranks."""

    def report(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    return report


def summary(options: TrainingOptions, examples: int, noun: str, ranks: int, tables: str) -> str:
    """Says what is trained and how: the first line of a program's output.

    Args:
        options: of the program.
        examples: how many there are to train on.
        noun: what the program calls them: 'rows', say.
        ranks: how many ranks train.
        tables: the model's tables, in words.
    """
    steps = counted(options.total_steps(examples), "step")
    return (
        f"{examples} training {noun}, {steps} of "
        f"{options.batch_size} {noun} on {counted(ranks, 'rank')}, {tables}, "
        f"{options.optimizer} at {options.learning_rate:g}"
    )


def is_on_terminal() -> bool:
    """Tells whether stderr ends on a terminal: the launcher knows, since it stands in between."""
    from_launcher = os.environ.get("COLLECTIVE_TERMINAL")
    return from_launcher == "1" if from_launcher in ("0", "1") else sys.stderr.isatty()


class Progress:
    """Shows how far training is; a context in which `step` is called after each training step.

    Samples per second are those of all ranks together. The loss is rank 0's own: on the bar the
    last step's, on a line the mean since the line before.

    Args:
        steps: how many steps there are, the finished ones included.
        batch_size: of all ranks together.
        rank: this process's rank.
        finished: how many steps were taken before.
    """

    def __init__(self, steps: int, batch_size: int, rank: int, finished: int = 0):
        self._steps, self._batch_size = steps, batch_size
        self._silent = rank != 0
        self._bar = None
        if not self._silent and is_on_terminal():
            self._bar = tqdm(
                total=steps,
                initial=finished,
                file=sys.stderr,
                ncols=min(100, shutil.get_terminal_size().columns),
                bar_format="{n_fmt}/{total_fmt} steps |{bar}| {elapsed}<{remaining}{postfix}",
            )
        self._step, self._first_step = finished, finished + 1
        self._losses: list[float] = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, loss: float) -> None:
        """Counts a step that had this loss on this rank."""
        if self._silent:
            return
        self._step += 1
        self._last = time.monotonic()
        if self._step == self._first_step:
            # The first step also starts the machinery: it doesn't count for the rate.
            self._started = self._last
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._rate()}, loss {loss:.4f} (rank 0)", refresh=False)
            self._bar.update()
            return
        self._losses.append(loss)
        if self._step * 10 // self._steps > (self._step - 1) * 10 // self._steps:
            self._print_line()

    def _print_line(self) -> None:
        mean = sum(self._losses) / len(self._losses)
        self._losses.clear()
        print(
            f"step {self._step}/{self._steps}  {self._rate()}  loss {mean:.4f} (rank 0)",
            file=sys.stderr,
            flush=True,
        )

    @property
    def samples_per_second(self) -> float:
        """Returns the rate since the first step, on rank 0; 0 before there is one."""
        steps = self._step - self._first_step
        if steps <= 0:
            return 0.0
        return steps * self._batch_size / (self._last - self._started)

    def _rate(self) -> str:
        rate = self.samples_per_second
        return f"{rate:,.0f} samples/s" if rate else "- samples/s"


class ProgressHook(tf.train.SessionRunHook):
    """Shows the progress of an Estimator's training; its evaluations count in the time it took.

    Args:
        loss: of a training step.
        steps, batch_size, rank: as in `Progress`.
    """

    def __init__(self, loss: tf.Tensor, steps: int, batch_size: int, rank: int):
        self._loss = loss
        self._steps, self._batch_size, self._rank = steps, batch_size, rank
        self._progress: Progress | None = None

    def after_create_session(self, session: tf.Session, coordinator: Any) -> None:
        if self._progress is not None:  # a session that was lost and created again
            self._progress.close()
        finished = int(session.run(tf.train.get_global_step()))
        self._progress = Progress(self._steps, self._batch_size, self._rank, finished)

    def before_run(self, context: Any) -> tf.train.SessionRunArgs:
        return tf.train.SessionRunArgs(self._loss)  # on every rank: ranks fetch alike

    def after_run(self, context: Any, values: Any) -> None:
        self._progress.step(values.results)

    def end(self, session: tf.Session) -> None:
        self._progress.close()

    @property
    def samples_per_second(self) -> float:
        return self._progress.samples_per_second if self._progress is not None else 0.0
