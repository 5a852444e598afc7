"""Tells the launcher how far this rank has trained, and from which checkpoint it would resume.

See `collective.job.milestones`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from collective.job import job_file
from collective.job.milestones import MilestoneBoard, Milestones

# The step in a checkpoint's name; for an increment that of its whole checkpoint.
_STEP = re.compile(r"-(\d+)(?:\.increment-\d+)?$")


class MilestonePoster:
    """Counts this process's milestones, and posts them if a launcher asks for them.

    Attributes:
        steps: how many training runs are complete.
        start: the global step at which they began.
        checkpoint_step: the global step of the checkpoint that was saved or restored last.
        saves: how many checkpoints, and increments of them, this process has taken part in saving.
        last_save: (global step, seconds since 1970) of the last of them; None before the first.

    Args:
        environment: the process's, in which the launcher has put the location of its board.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._process = os.getpid()
        self.steps = self.start = self.checkpoint_step = self.saves = 0
        self.last_save: tuple[int, float] | None = None
        self._board, self._rank = MilestoneBoard.of_rank(environment, self._process)
        if self._board is not None:
            self._board.post(self._rank, Milestones(self._process))

    @property
    def is_ending(self) -> bool:
        """Tells whether the launcher is ending the job: nothing needs to be saved any more."""
        return self._board is not None and self._board.is_ending

    def trained(self) -> None:
        """Posts that one more training run is complete."""
        if not self.steps and self._board is not None and self._rank == 0:
            job_file.warn_unless_followed()
        self.steps += 1
        if self._board is not None:
            self._board.post_steps(self._rank, self.steps)

    def has_checkpoint(self, path: str, step: int | None = None) -> None:
        """Posts the checkpoint that was saved or restored last.

        Args:
            path: its prefix.
            step: its global step; None: the step in the name, which an increment's lacks.
        """
        if self._process != os.getpid():
            return
        if step is None:
            number = _STEP.search(path)
            step = int(number[1]) if number else 0
        self.checkpoint_step = step
        if not self.steps:
            self.start = step
        if self._board is not None:
            self._board.post(
                self._rank, Milestones(self._process, self.steps, self.start, path, step)
            )

    def has_saved(self) -> None:
        """Counts a save, after `has_checkpoint`."""
        self.saves += 1
        self.last_save = self.checkpoint_step, time.time()


_posters: dict[int, MilestonePoster] = {}


def poster() -> MilestonePoster:
    """Returns the poster of this process; a fork isn't a rank and posts nothing."""
    made = _posters.get(os.getpid())
    if made is None:
        made = _posters[os.getpid()] = MilestonePoster({} if _posters else os.environ)
    return made
