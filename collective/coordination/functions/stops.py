"""Stops eager code between two steps on all ranks, once one is told to stop.

Ranks learn of it in a call of a function, or in a meeting, which they complete
(`collective.coordination.preemption`). What would begin another step then raises `Preempted`:

    a call of a function that trains or takes data     `fit`, a loop of a script's own
    a tape, outside of functions                       a loop without a function
    a step of a Keras model without a function         `run_eagerly=True`

`fit` of a Keras model lets its callbacks save then. Nothing more is refused, until another `fit`
begins.
"""

from __future__ import annotations

import dataclasses

from collective.coordination.preemption import PREEMPTION, StoppableRun
from collective.errors import Preempted


@dataclasses.dataclass(frozen=True)
class Step:
    """Says what a call of a function does.

    Attributes:
        trains: whether it updates a table or a trainable variable.
        takes_data: whether it takes a batch, or does something else that may end by itself.
    """

    trains: bool
    takes_data: bool


TRAINING = Step(trains=True, takes_data=True)


@dataclasses.dataclass
class _EagerCode:
    """Holds the state of eager code, in the place of a session's.

    Attributes:
        is_stopping: whether it was told to stop, and now does what belongs to its end.
    """

    is_stopping: bool = False


_EAGER = _EagerCode()


def begin(step: StoppableRun) -> None:
    """Begins what may be a step.

    Raises:
        Preempted: it trains or takes data, and the ranks stop.
    """
    if step.trains or step.takes_data:
        PREEMPTION.watch()
        PREEMPTION.stop(_EAGER, step)


def is_due(step: StoppableRun) -> bool:
    """Tells whether `begin` would raise now."""
    return PREEMPTION.is_told and not _EAGER.is_stopping and (step.trains or step.takes_data)


def error() -> Preempted:
    """Returns the error to raise for a step that `is_due` to be refused."""
    return PREEMPTION.error(_EAGER)


def begin_again() -> None:
    """Notes that a script begins to train: it is told to stop again if it was before."""
    _EAGER.is_stopping = False
