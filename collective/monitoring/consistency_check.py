"""Checks that replicated variables are still equal on all ranks: scope(check=k).

    every k-th training run of a session ──► this rank's checksums ──► a meeting ──► an error on all
                                                                                    ranks, or none

Calls of functions that train are checked alike. After 1, 2, 4, 8, … of them the ranks compare in
any case, less strictly, and warn: two numbers of each variable show what is more than rounding.

Replicas start equal, every rank applies the same updates to them, and an assignment of the script
becomes the mean over ranks (see `collective.replication.assignments`). Anything else that a script
does to them (feeding or running something different on one rank) makes replicas drift apart, which
would go unnoticed until the numbers are wrong.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import barrier, coordinator
from collective.coordination.functions.calls import FunctionPlan
from collective.coordination.session_state import state_of_session
from collective.errors import ReplicaError
from collective.ops.communication import collectives
from collective.ops.graph import graph_analysis
from collective.ops.graph.sessions import run_unpatched
from collective.replication import drifts, eager_states
from collective.replication.analysis import replicated_variables
from collective.replication.pending_syncs import pending_syncs_of
from collective.tables.table import is_movable

SHOWN = 5  # variables in one error
NEAR = 1e-3  # of a variable's size: what differs by less may be rounding
SAMPLED = 1 << 20  # elements of a variable by which it is compared less strictly
CAUSES = (
    "Usually one was updated from what only this rank knows (integers that count its part of the "
    "data; its rank; numbers that NumPy or Python drew without a seed; a learning rate that a "
    "callback changed by the logs of a batch) or loaded on some ranks only. Update it from what "
    "all ranks have: horovod.tensorflow.allreduce(x) is the mean of their x. Or make what is meant "
    "to be each rank's own a local variable: collections=[tf.GraphKeys.LOCAL_VARIABLES], "
    "in eager code synchronization=tf.VariableSynchronization.ON_READ."
)


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
        lambda: {str(v.name): _checksum_in(session, v) for v in _compared(session.graph)},
    )
    unequal = _unequal(checksums_by_rank)
    if unequal:
        raise ReplicaError(
            _error_text(f"training run {number} of this session", "run", unequal, runs_between)
        )


def after_call(plan: FunctionPlan, calls_between: int) -> None:
    """Compares variables that a function uses, if it is time; every rank calls it after a call.

    Args:
        plan: of the function, which trains.
        calls_between: of how many calls one is followed by a strict comparison; 0 for none.

    Raises:
        ReplicaError: a variable isn't equal on all ranks, by a strict comparison; on every rank.
        RankError: a rank could not read its own, or does something else; on every rank.
    """
    number = coordinator.instance().training_calls
    is_strict = calls_between > 0 and number % calls_between == 0
    if not is_strict and number & (number - 1):
        return
    variables: dict[str, Any] = {}
    names: collections.Counter[str] = collections.Counter()
    for v in plan.variables:
        is_own = v.synchronization == tf.VariableSynchronization.ON_READ or not is_movable(v)
        if is_own or eager_states.state_of(v) is not None:
            continue
        if is_strict or v.dtype.is_floating and not drifts.is_warned_of(v):
            name = str(v.name)
            names[name] += 1
            variables[f"{name} ({names[name]})" if names[name] > 1 else name] = v
    of_variable: Callable[[Any], Any] = _checksum_of if is_strict else _size_and_direction
    said = barrier.run_on_all_ranks(
        None,
        f"compares replicated variables after call {number} that trains",
        lambda: {name: of_variable(v) for name, v in variables.items()},
    )
    if is_strict:
        if unequal := _unequal(said):
            when = f"call {number} that trains"
            raise ReplicaError(_error_text(when, "call", unequal, calls_between))
        return
    drifted = [
        name
        for name in variables
        if any(not _is_near(of_rank[name], said[0][name]) for of_rank in said if name in of_rank)
    ]
    for name in drifted:
        drifts.note_warning(variables[name])
    if drifted and collectives.rank() == 0:
        listed = ", ".join(f"'{name}'" for name in drifted[:SHOWN])
        if len(drifted) > SHOWN:
            listed += f" and {len(drifted) - SHOWN} more"
        tf.logging.warning(
            f"After call {number} that trains, replicated variables are not equal on all ranks any "
            f"more: {listed}. {CAUSES} scope(check=1) finds the first call after which they differ."
        )


def _checksum_of(variable: Any) -> str:
    return _checksum(variable.numpy())


def _size_and_direction(variable: Any) -> list[float]:
    """Returns the root of the mean square, and the product with a fixed direction of length 1.

    Of a large variable these are of elements in equal distances.
    """
    distance = -(-variable.shape.num_elements() // SAMPLED) or 1
    flat = np.asarray(tf.reshape(variable, [-1])[::distance], np.float64)
    if not flat.size:
        return [0.0, 0.0]
    direction = np.random.default_rng(0).integers(0, 2, flat.size, np.int8) * 2.0 - 1.0
    return [float(np.sqrt(np.mean(flat**2))), float(flat @ direction / np.sqrt(flat.size))]


def _is_near(a: Sequence[float], b: Sequence[float]) -> bool:
    """Tells whether two variables may differ by rounding alone, of what `_size_and_direction` says.

    Both numbers change by about the size of a difference.
    """
    size = max(abs(a[0]), abs(b[0]))
    if not np.isfinite(size):
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(np.allclose(a, b, rtol=0, atol=NEAR * size))


def _unequal(checksums_by_rank: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Returns the checksums by rank of the variables that aren't equal."""
    unequal: dict[str, list[str]] = {}
    for name in checksums_by_rank[0]:
        of_ranks = [checksums.get(name) for checksums in checksums_by_rank]
        if len(set(of_ranks) - {None}) > 1:
            unequal[name] = [checksum or "" for checksum in of_ranks]
    return unequal


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


def _checksum_in(session: Any, variable: Any) -> str:
    try:
        return _checksum(run_unpatched(session, variable))
    except tf.errors.FailedPreconditionError:
        return "not initialized"


def _checksum(value: np.ndarray) -> str:
    """Returns a digest of a value's bits, so that NaN is equal to itself."""
    value = np.ascontiguousarray(value)
    digest = hashlib.blake2b(f"{value.dtype} {value.shape}".encode(), digest_size=12)
    digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _error_text(
    when: str, kind: str, unequal: Mapping[str, Sequence[str]], runs_between: int
) -> str:
    """Says which variables are unequal, and which ranks have the same value of them.

    Args:
        when: the training run or call before the comparison.
        kind: 'run' or 'call'.
        unequal: for each variable the checksums, by rank.
        runs_between: how many of them there are between two comparisons.
    """
    shown = list(unequal.items())[:SHOWN]
    variables = ", ".join(f"'{name}' ({_ranks_by_value(of_ranks)})" for name, of_ranks in shown)
    if len(unequal) > SHOWN:
        variables += f" and {len(unequal) - SHOWN} more"
    advice = ""
    if runs_between > 1:
        advice = f" scope(check=1) finds the first {kind} after which they differ."
    return (
        f"After {when}, replicated variables are not equal on all ranks any more: {variables}. "
        f"{CAUSES}{advice}"
    )


def _ranks_by_value(checksums: Sequence[str]) -> str:
    """Lists the ranks that have the same value: 'rank 0, 2 | rank 1'."""
    groups = []
    for value in dict.fromkeys(checksums):
        ranks = [str(rank) for rank, checksum in enumerate(checksums) if checksum == value]
        groups.append("rank " + ", ".join(ranks))
    return " | ".join(groups)
