"""Keeps note of why a process can't go on with its peers: a run of it failed half-way, or it is a
fork of a rank.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import RankError
from collective.ops.communication import carriers, collectives

FORKED = (
    "This process was forked from a rank and is not a rank itself. Only the ranks can run what all "
    "of them run."
)


class Broken:
    """Is the description of the run that failed half-way, or FORKED, as an attribute; or None.

    From then on nothing is exchanged through shared memory.
    """

    def __get__(self, holder: Any, kind: type) -> str | None:
        return holder.__dict__.get("broken") or carriers.given_up() or None

    def __set__(self, holder: Any, failure: tf.errors.OpError | str) -> None:
        if isinstance(failure, tf.errors.OpError):
            failure = f"{type(failure).__name__}: {failure.message}"
        holder.__dict__["broken"] = failure


def failure(error: tf.errors.OpError) -> tf.errors.OpError:
    """Returns what to raise for a run that failed half-way, once peers that wait are told."""
    carriers.give_up()
    return error


def refusal(broken: str) -> RankError:
    """Returns what to raise in place of whatever needs the peers."""
    if broken is FORKED:
        return RankError(FORKED)
    return RankError(
        f"An earlier run failed half-way on rank {collectives.rank()}, and this process can "
        f"exchange nothing more with the other ranks. Start the job again. It failed with: {broken}"
    )
