"""Gives eager variables equal first values before a tape records what is computed with them.

A function that ranks call together makes its variables equal at its first call. Eager code has no
such moment: TensorFlow's operations read a variable's memory without asking anyone. So all that
were made are made equal when a tape starts to record, and at once while one records:

    variables are made ──► a tape starts ──► rank 0's values ──► a model is built in its block ──► …
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import barrier, coordinator
from collective.coordination.functions import calls
from collective.coordination.prepared_run import Membership
from collective.ops.communication import collectives
from collective.tables.table import is_replicated
from collective.tensorflow_internals.graphs import record

_new: list[weakref.ref[Any]] = []
# Those of eager code whose blocks are open.
_tapes: list[Any] = []


def make(original: Callable[..., None], variable: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces `ResourceVariable._init_from_args`: notes a variable that eager code makes."""
    original(variable, *args, **kwargs)
    if collectives.size() > 1 and tf.executing_eagerly():
        _new.append(weakref.ref(variable))
        if _tapes:
            _share_new()


def start(original: Callable[..., Any], tape: Any) -> Any:
    """Replaces `tf.GradientTape.__enter__`."""
    if collectives.size() > 1 and tf.executing_eagerly():
        _share_new()
        _tapes.append(tape)
    return original(tape)


def stop(original: Callable[..., Any], tape: Any, *error: Any) -> Any:
    """Replaces `tf.GradientTape.__exit__`."""
    _tapes[:] = [each for each in _tapes if each is not tape]
    return original(tape, *error)


def _share_new() -> None:
    made = [variable for each in _new if (variable := each()) is not None]
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
        is_replicated(variable)
        and bool(variable.dtype.base_dtype.is_floating)
        and (variable.trainable or variable.synchronization != tf.VariableSynchronization.ON_READ)
    )
