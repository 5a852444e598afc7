"""What this rank tells the launcher of its progress, so that a stall has an owner (see
`collective.launch.stall_detector`).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

from collective.launch.progress_board import VARIABLE, Board, Label, Phase

_NOTHING = Label("nothing yet")


class Progress:
    """Posts what this process does, if a launcher wants to know. Every post takes some two
    microseconds.

        with progress.does('runs loss'):
            progress.enters(Phase.AGREEING)     # from here on it may wait for its peers
            ...
            progress.passed += 1                # they have agreed
            progress.enters(Phase.RUNNING)
            ...
                                                # and from here on it doesn't

    A fork of this process posts nothing. Without a launcher (`horovodrun`, plain `python`) nobody
    does.

    Attributes:
        passed: how many agreements with the peers are behind this rank: the same ones on every
            rank.

    Args:
        environment: the process's, in which the launcher has put the place of its board.
    """

    def __init__(self, environment: Mapping[str, str]):
        self.passed = 0
        self._label = self._posted = _NOTHING
        self._phase = Phase.AWAY
        self._process = os.getpid()
        self._board, self._rank = _board(environment, self._process)

    def enters(self, phase: Phase) -> None:
        """From now on this rank is in `phase` of what it does."""
        if self._board is None or self._process != os.getpid():
            return
        record = (self._process, phase, self.passed, time.monotonic_ns())
        self._board.post(self._rank, record, self._label, self._label is self._posted)
        self._posted, self._phase = self._label, phase

    def does(self, doing: str | Label) -> Progress:
        """What the phases to come belong to. As a context: behind it this rank is AWAY."""
        if self._board is not None:
            self._label = Label(doing) if isinstance(doing, str) else doing
        return self

    def works(self, doing: str) -> None:
        """From now on this rank works on its own for all, who wait more patiently, until it enters
        another phase or leaves.
        """
        self.does(doing).enters(Phase.WORKING)

    def leaves(self) -> None:
        """From now on this rank does nothing that the ranks share."""
        # else who fails again and again before he enters anything would seem to get on
        if self._phase != Phase.AWAY:
            self.enters(Phase.AWAY)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        self.leaves()


def _board(environment: Mapping[str, str], process: int) -> tuple[Board | None, int]:
    """The launcher's board and this rank's number on it; None if there is none for this process."""
    place = environment.get(VARIABLE)
    if not place:
        return None, 0
    try:
        board, rank = Board.open(place), int(environment["LOCAL_RANK"])
        there = board.read(rank)
    except (OSError, ValueError, KeyError, IndexError) as error:
        warnings.warn(
            f"{VARIABLE}={place} is no board to post progress on "
            f"({type(error).__name__}: {error}): "
            "the launcher will not see this rank stall",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, 0
    # What a rank starts inherits its environment, and its number, but is no rank.
    taken = there is not None and there.pid != process and os.path.exists(f"/proc/{there.pid}")
    return (None if taken else board), rank
