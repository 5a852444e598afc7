"""Tells the launcher how far this rank has trained, and from which checkpoint it would resume.

See `collective.job.milestones`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from collective.job import job_file
from collective.job.milestones import MilestoneBoard, Milestones

# The step in a checkpoint's name; for an increment that of its whole checkpoint.
_STEP = re.compile(r"-(\d+)(?:\.increment-\d+)?$")


class MilestonePoster:
    """Posts this process's milestones if a launcher asks for them.

    Args:
        environment: the process's, in which the launcher has put the location of its board.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._process = os.getpid()
        self._steps = self._start = 0
        self._board, self._rank = MilestoneBoard.of_rank(environment, self._process)
        if self._board is not None:
            self._board.post(self._rank, Milestones(self._process))

    @property
    def is_ending(self) -> bool:
        """Tells whether the launcher is ending the job: nothing needs to be saved any more."""
        return self._board is not None and self._board.is_ending

    def trained(self) -> None:
        """Posts that one more training run is complete."""
        if self._board is not None:
            if not self._steps and self._rank == 0:
                job_file.warn_unless_followed()
            self._steps += 1
            self._board.post_steps(self._rank, self._steps)

    def has_checkpoint(self, path: str, step: int | None = None) -> None:
        """Posts the checkpoint that was saved or restored last.

        Args:
            path: its prefix.
            step: its global step; None: the step in the name, which an increment's lacks.
        """
        if self._board is None or self._process != os.getpid():
            return
        if step is None:
            number = _STEP.search(path)
            step = int(number[1]) if number else 0
        if not self._steps:
            self._start = step
        self._board.post(
            self._rank, Milestones(self._process, self._steps, self._start, path, step)
        )


_posters: dict[int, MilestonePoster] = {}


def poster() -> MilestonePoster:
    """Returns the poster of this process; a fork isn't a rank and posts nothing."""
    made = _posters.get(os.getpid())
    if made is None:
        made = _posters[os.getpid()] = MilestonePoster({} if _posters else os.environ)
    return made
