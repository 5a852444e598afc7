"""How far training is: a bar on a terminal, a plain line at every tenth of the way elsewhere, on
rank 0 only.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable

import tensorflow.compat.v1 as tf
from tqdm import tqdm


def on_terminal() -> bool:
    """Whether what this process writes to stderr ends on a terminal: the launcher knows, it stands
    in between.
    """
    told = os.environ.get("COLLECTIVE_TERMINAL")
    return told == "1" if told in ("0", "1") else sys.stderr.isatty()


class Progress:
    """A context; call `step` after each training step with this rank's loss. `done` steps were
    taken before.

    The samples are all ranks' together. The loss is rank 0's own: on the bar the last step's, on a
    line the mean since the line before.
    """

    def __init__(self, steps: int, batch: int, rank: int, done: int = 0):
        self._steps, self._batch = steps, batch
        self._silent = rank != 0
        self._bar = None
        if not self._silent and on_terminal():
            self._bar = tqdm(
                total=steps,
                initial=done,
                file=sys.stderr,
                ncols=min(100, shutil.get_terminal_size().columns),
                bar_format="{n_fmt}/{total_fmt} steps |{bar}| {elapsed}<{remaining}{postfix}",
            )
        self._done, self._before = done, done
        self._losses: list[float] = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, loss: float) -> None:
        if self._silent:
            return
        self._done += 1
        if self._done == self._before + 1:
            # the first step also starts the machinery: it doesn't count for the rate
            self._started = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._rate()}, loss {loss:.4f} (rank 0)", refresh=False)
            self._bar.update()
            return
        self._losses.append(loss)
        tenth = self._done * 10 // self._steps
        if tenth > (self._done - 1) * 10 // self._steps:
            mean = sum(self._losses) / len(self._losses)
            print(
                f"step {self._done}/{self._steps}  {self._rate()}  loss {mean:.4f} (rank 0)",
                file=sys.stderr,
                flush=True,
            )
            self._losses.clear()

    def _rate(self) -> str:
        seconds, steps = time.monotonic() - self._started, self._done - self._before - 1
        return f"{steps * self._batch / seconds:,.0f} samples/s" if steps else "- samples/s"


class ProgressHook(tf.train.SessionRunHook):
    """`Progress` for an Estimator, which takes the steps itself."""

    def __init__(self, loss: tf.Tensor, steps: int, batch: int, rank: int, done: int = 0):
        self._loss, self._progress = loss, Progress(steps, batch, rank, done)

    def before_run(self, context) -> tf.train.SessionRunArgs:
        return tf.train.SessionRunArgs(self._loss)

    def after_run(self, context, values) -> None:
        self._progress.step(values.results)

    def end(self, session) -> None:
        self._progress.close()


def speaker(rank: int) -> Callable[[str], None]:
    """What prints a line, on rank 0; what doesn't, elsewhere."""
    return lambda line: print(line, flush=True) if rank == 0 else None
