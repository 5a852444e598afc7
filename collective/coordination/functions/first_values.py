"""Gives eager variables equal first values before a tape records what is computed with them.

A function that ranks call together makes its variables equal at its first call. Eager code has no
such moment: TensorFlow's operations read a variable's memory without asking anyone. So all that
were made are made equal when a tape starts to record, and at once while one records:

    variables are made ──► a tape starts ──► rank 0's values ──► a model is built in its block ──► …
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import barrier, coordinator
from collective.coordination.functions import calls, stops
from collective.coordination.prepared_run import Membership
from collective.ops.communication import collectives
from collective.tables.eager_lookups import is_in_own_thread
from collective.tables.table import Sharded, is_replicated
from collective.tensorflow_internals.graphs import record

# Those that eager code has made since, by their ids.
_new: dict[int, weakref.ref[Any]] = {}


class _OfThread(threading.local):
    """Holds what a thread does.

    Attributes:
        recorders: tapes whose blocks are open, and whatever else has variables shared at once.
    """

    def __init__(self) -> None:
        self.recorders: list[Any] = []


_of_thread = _OfThread()


def make(original: Callable[..., None], variable: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces `ResourceVariable._init_from_args`: notes a variable that eager code makes."""
    original(variable, *args, **kwargs)
    if _may_share() and not isinstance(variable, Sharded):
        key = id(variable)
        _new[key] = weakref.ref(variable, lambda _: _new.pop(key, None))
        if _of_thread.recorders:
            _share_new()


def start(original: Callable[..., Any], tape: Any) -> Any:
    """Replaces `tf.GradientTape.__enter__`: a step of eager code begins.

    Raises:
        Preempted: the ranks stop.
    """
    if tf.executing_eagerly() and not is_in_own_thread():
        stops.begin(stops.TRAINING)
    if _may_share():
        if _new:
            # Models that nobody uses any more, which Python would collect on each rank at another
            # moment: some ranks would still have theirs.
            gc.collect()
        _share_new()
        _of_thread.recorders.append(tape)
    return original(tape)


def stop(original: Callable[..., Any], tape: Any, *error: Any) -> Any:
    """Replaces `tf.GradientTape.__exit__`."""
    _of_thread.recorders = [each for each in _of_thread.recorders if each is not tape]
    return original(tape, *error)


@contextlib.contextmanager
def shared_at_once() -> Iterator[None]:
    """Inside, variables get rank 0's values when they are made, as in a tape's block."""
    _of_thread.recorders.append(None)
    try:
        yield
    finally:
        _of_thread.recorders.remove(None)


def _may_share() -> bool:
    # A tf.py_function has tapes of its own, in a thread for which a call of all ranks may wait.
    return collectives.size() > 1 and tf.executing_eagerly() and not is_in_own_thread()


def _share_new() -> None:
    made = [variable for each in list(_new.values()) if (variable := each()) is not None]
    _new.clear()
    share(made)


def share(variables: Sequence[Any]) -> None:
    """Gives all ranks rank 0's values of the weights among `variables` that they haven't shared.

    Every rank calls it with the same ones. Tables and their slots are no rank's alone, and states
    of metrics are this rank's own.

    Raises:
        RankError: another rank has others, or does something else.
    """
    new = [v for v in variables if _is_weight(v) and not getattr(v, "_collective_equal", False)]
    if not new or collectives.size() == 1:
        return
    new.sort(key=calls.order)
    ranks = coordinator.instance()
    with ranks.one_at_a_time, ranks.progress, record.stop_recording():
        ranks.deliver_failure()
        ranks.refuse_if_broken()
        description = f"computes with the variable '{new[0].name}' for the first time"
        ranks.progress.does(description)
        member = Membership(calls.NUMBER, [])
        calls.make_variables_equal(ranks, new, 0, member, (), description)


def check(variables: Sequence[Any]) -> None:
    """Checks that variables, with which a tape has recorded, had the same values on all ranks.

    Those that were made inside scope() have. Every rank calls it with the same ones.

    Raises:
        ValueError: one that was made outside hasn't, on all ranks.
        RankError: another rank has others, or does something else.
    """
    unknown = [v for v in variables if _is_weight(v) and not getattr(v, "_collective_equal", False)]
    if not unknown or collectives.size() == 1:
        return
    unknown.sort(key=calls.order)
    names = [str(v.name) for v in unknown]
    digests = [hashlib.blake2b(v.numpy().tobytes(), digest_size=8).hexdigest() for v in unknown]
    said = barrier.exchange(None, f"comparing first values of {names}", {"digests": digests})
    for rank, each in enumerate(said):
        for name, own, first in zip(names, each["digests"], said[0]["digests"]):
            if own != first:
                raise ValueError(
                    f"The variable '{name}' was made outside of `with strategy.scope():`, and has "
                    f"other values on rank {rank} than on rank 0: gradients would be of different "
                    "models. Make it inside, or give it the same values on all ranks."
                )
    for variable in unknown:
        variable._collective_equal = True


def _is_weight(variable: Any) -> bool:
    return (
        not isinstance(variable, Sharded)  # which isn't marked while it is made
        and is_replicated(variable)
        and bool(variable.dtype.base_dtype.is_floating)
        and (variable.trainable or variable.synchronization != tf.VariableSynchronization.ON_READ)
    )
