"""Checks that replicated variables are still equal on all ranks: scope(check=k).

    every k-th training run of a session ──► this rank's checksums ──► a meeting ──► an error on all
                                                                                    ranks, or none

Replicas start equal, every rank applies the same updates to them, and an assignment of the script
becomes the mean over ranks (see `collective.replication.assignments`). Anything else that a script
does to them (feeding or running something different on one rank) makes replicas drift apart, which
would go unnoticed until the numbers are wrong.
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
from collective.ops.communication import collectives
from collective.ops.graph import graph_analysis
from collective.ops.graph.sessions import run_unpatched
from collective.replication.analysis import replicated_variables
from collective.replication.pending_syncs import pending_syncs_of

SHOWN = 5  # variables in one error


def after_training(session: Any, runs_between: int) -> None:
    """Counts a training run of `session`; after every `runs_between`-th the ranks compare.

    Every rank calls it.

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
    checksums_by_rank = barrier.run_on_all_ranks(
        session,
        f"compares replicated variables after training run {number} (scope(check={runs_between}))",
        lambda: {str(v.name): _checksum(session, v) for v in _compared(session.graph)},
    )
    unequal: dict[str, list[str]] = {}
    for name in checksums_by_rank[0]:
        of_ranks = [checksums.get(name) for checksums in checksums_by_rank]
        if len(set(of_ranks) - {None}) > 1:
            unequal[name] = [checksum or "" for checksum in of_ranks]
    if unequal:
        raise ReplicaError(_error_text(number, unequal, runs_between))


def _compared(graph: tf.Graph) -> list[Any]:
    """Returns replicated variables, and variables of averages over all ranks.

    Averages are compared even if a layer says that each rank has its own.
    """
    averaged, variables = pending_syncs_of(graph).averaged, replicated_variables(graph)
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        is_averaged = graph_analysis.memory(variable) in averaged
        if is_averaged and not any(variable is other for other in variables):
            variables.append(variable)
    return variables


def _checksum(session: Any, variable: Any) -> str:
    """Reads a variable; returns a digest of its bits, so that NaN is equal to itself."""
    try:
        value = np.ascontiguousarray(run_unpatched(session, variable))
    except tf.errors.FailedPreconditionError:
        return "not initialized"
    digest = hashlib.blake2b(f"{value.dtype} {value.shape}".encode(), digest_size=12)
    digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _error_text(number: int, unequal: Mapping[str, Sequence[str]], runs_between: int) -> str:
    """Says which variables are unequal, and which ranks have the same value of them.

    Args:
        number: the training run's.
        unequal: for each variable the checksums, by rank.
        runs_between: how many training runs there are between two comparisons.
    """
    shown = list(unequal.items())[:SHOWN]
    variables = ", ".join(f"'{name}' ({_ranks_by_value(of_ranks)})" for name, of_ranks in shown)
    if len(unequal) > SHOWN:
        variables += f" and {len(unequal) - SHOWN} more"
    advice = ""
    if runs_between > 1:
        advice = " scope(check=1) finds the first run after which they differ."
    return (
        f"After training run {number} of this session replicated variables are not equal on all "
        f"ranks any more: {variables}. Usually one was updated from what only this rank knows "
        "(integers that count its part of the data; its rank; numbers that NumPy or Python drew "
        "without a seed) or loaded on some ranks only. Update it from what all ranks have: "
        "horovod.tensorflow.allreduce(x) is the mean of their x. Or make what is meant to be each "
        f"rank's own a local variable: collections=[tf.GraphKeys.LOCAL_VARIABLES].{advice}"
    )


def _ranks_by_value(checksums: Sequence[str]) -> str:
    """Lists the ranks that have the same value: 'rank 0, 2 | rank 1'."""
    groups = []
    for value in dict.fromkeys(checksums):
        ranks = [str(rank) for rank, checksum in enumerate(checksums) if checksum == value]
        groups.append("rank " + ", ".join(ranks))
    return " | ".join(groups)
