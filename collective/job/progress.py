"""Tells the launcher what this rank does, so that it can name the rank that causes a stall.

See `collective.launch.progress.stall_detector`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from collective.job import stack_signal
from collective.job.progress_board import Board, Label, Phase

_NOTHING = Label("nothing yet")


class Progress:
    """Posts what this process does if a launcher asks for it.

    A post takes about two microseconds.

        with progress.does('runs loss'):
            progress.enters(Phase.AGREEING)     # from here on it may wait for its peers
            ...
            progress.passed += 1                # they have agreed
            progress.enters(Phase.RUNNING)
            ...
                                                # and from here on it doesn't

    A fork of this process posts nothing, and neither does a process without a launcher
    (`horovodrun`, plain `python`).

    Attributes:
        passed: how many agreements with the peers this rank has completed; every rank counts the
            same.

    Args:
        environment: the process's, in which the launcher has put the place of its board.
    """

    def __init__(self, environment: Mapping[str, str]):
        self.passed = 0
        self._label = self._posted = _NOTHING
        self._phase = Phase.AWAY
        self._process = os.getpid()
        self._board, self._rank = Board.of_rank(environment, self._process)
        if self._board is not None:
            stack_signal.answer(self._rank)

    def enters(self, phase: Phase) -> None:
        """Posts that this rank enters `phase` of its current work."""
        if self._board is None or self._process != os.getpid():
            return
        record = (self._process, phase, self.passed, time.monotonic_ns())
        self._board.post(self._rank, record, self._label, self._label is self._posted)
        self._posted, self._phase = self._label, phase

    def does(self, description: str | Label) -> Progress:
        """Describes the work that the next phases belong to.

        As a context: afterwards this rank is AWAY.
        """
        if self._board is not None:
            self._label = Label(description) if isinstance(description, str) else description
        return self

    def works(self, description: str) -> None:
        """Posts that this rank works alone for all ranks, until it enters another phase or leaves.

        The launcher allows more time for that.
        """
        self.does(description).enters(Phase.WORKING)

    def leaves(self) -> None:
        """Posts that from now on this rank does nothing that ranks share."""
        # A rank that fails repeatedly before it enters anything must not appear to make progress.
        if self._phase != Phase.AWAY:
            self.enters(Phase.AWAY)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        self.leaves()
