"""Draws the progress of a training on a terminal: steps, samples per second, and the loss."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

from tqdm import tqdm

_OF_STEPS = "{n_fmt}/{total_fmt} steps |{bar}| {elapsed}<{remaining}{postfix}"
_OF_TIME = "{n_fmt} steps {elapsed}{postfix}"  # the clock says when training ends
_WIDEST = 100  # columns


class ProgressBar:
    """Draws a bar. Only rank 0 has one.

    Args:
        steps: how many there are; None if that isn't known.
        finished: how many were taken before.
        file: where it is drawn; None: stderr.
    """

    def __init__(self, steps: int | None, finished: int, file: TextIO | None = None):
        self._bar = tqdm(
            total=steps,
            initial=finished,
            file=file or sys.stderr,
            ncols=min(_WIDEST, shutil.get_terminal_size().columns),
            bar_format=_OF_TIME if steps is None else _OF_STEPS,
        )

    def step(self, samples_per_s: float | None, loss: float | None) -> None:
        """Counts a step.

        Args:
            samples_per_s: of all ranks; None if it isn't known yet.
            loss: the mean of all ranks, as it was reported last; None before.
        """
        words = [] if samples_per_s is None else [f"{samples_per_s:,.0f} samples/s"]
        words += [] if loss is None else [f"loss {loss:.4f}"]
        self._bar.set_postfix_str(", ".join(words), refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def is_on_terminal() -> bool:
    """Tells whether stderr ends on a terminal: the launcher knows, since it stands in between."""
    from_launcher = os.environ.get("COLLECTIVE_TERMINAL")
    return from_launcher == "1" if from_launcher in ("0", "1") else sys.stderr.isatty()
