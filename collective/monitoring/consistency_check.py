"""Whether replicated variables are still equal on all ranks: scope(check=k).

    every k-th training run of a session ──► this rank's checksums ──► a meeting ──► an error on all
    ranks, or on none

They start equal, every rank applies the same updates to them, and what a script assigns becomes the
mean over ranks (see `collective.replication.assignments`). Whatever else it does to them (it feeds, or runs,
something else on one rank) makes replicas drift apart, and nobody would notice before the numbers
are wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.coordination.session_state import state_of_session
from collective.errors import ReplicaError
from collective.ops import collectives, graph_analysis
from collective.ops.sessions import run_unpatched
from collective.replication.analysis import replicated_variables
from collective.replication.pending_syncs import pending_syncs_of

FIRST = 5  # variables that an error names


def after_training(session: Any, runs_between: int) -> None:
    """Called on every rank after a training run of `session`. After every `runs_between`-th of them
    ranks compare.

    Raises:
        ReplicaError: a replicated variable isn't equal on all ranks; on every rank.
        RankError: a rank could not read its own, or does something else; on every rank.
    """
    if collectives.size() == 1:
        return
    state = state_of_session(session)
    state.training_runs += 1
    number = state.training_runs
    if number % runs_between:
        return
    told = barrier.together(
        session,
        f"compares replicated variables after training run {number} (scope(check={runs_between}))",
        lambda: {str(v.name): _checksum(session, v) for v in _compared(session.graph)},
    )
    odd = [name for name in told[0] if len({mine.get(name) for mine in told} - {None}) > 1]
    if odd:
        raise ReplicaError(
            _says(
                number,
                {name: [mine.get(name, "") for mine in told] for name in odd[:FIRST]},
                len(odd) - FIRST,
                runs_between,
            )
        )


def _compared(graph: tf.Graph) -> list[Any]:
    """Replicated variables, and those that averages of all ranks are in, though a layer says that
    each rank has its own.
    """
    averaged, found = pending_syncs_of(graph).averaged, replicated_variables(graph)
    return found + [
        v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if graph_analysis.memory(v) in averaged and not any(v is x for x in found)
    ]


def _checksum(session: Any, variable: Any) -> str:
    """Of the bits, so that NaN is equal to itself. One variable at a time is read."""
    try:
        value = np.ascontiguousarray(run_unpatched(session, variable))
    except tf.errors.FailedPreconditionError:
        return "not initialized"
    digest = hashlib.blake2b(f"{value.dtype} {value.shape}".encode(), digest_size=12)
    digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _says(number: int, sums: Mapping[str, Sequence[str]], more: int, runs_between: int) -> str:
    """The error: which variables, and which ranks have which value of them."""
    named = ", ".join(f"'{name}' ({_groups(of)})" for name, of in sums.items()) + (
        f" and {more} more" if more > 0 else ""
    )
    closer = (
        " scope(check=1) finds the first run after which they differ." if runs_between > 1 else ""
    )
    return (
        f"After training run {number} of this session replicated variables are not equal on "
        f"all ranks any more: {named}. "
        "Usually one was updated from what only this rank knows (integers that count its part "
        "of the data; its rank; "
        "numbers that NumPy or Python drew without a seed) or loaded on some ranks only. "
        "Update it from what all ranks have: horovod.tensorflow.allreduce(x) is the mean of "
        "their x. Or make what is meant "
        f"to be each rank's own a local variable: "
        f"collections=[tf.GraphKeys.LOCAL_VARIABLES].{closer}"
    )


def _groups(sums: Sequence[str]) -> str:
    """Which ranks have the same."""
    return " | ".join(
        "rank " + ", ".join(str(r) for r, mine in enumerate(sums) if mine == value)
        for value in dict.fromkeys(sums)
    )
