"""Finds the rows that a run reads in addition to its updates, such as those of a lookup that is
fetched with a step.

They are to be as they were before the step. Where a rank's gradients depend on them that is so by
itself; other rows are waited for (`ops/native/awaited_rows.h`). So it is through shared memory
and by NCCL; Horovod, which asks all ranks before each collective, carries rows first because they
are ready first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.communication import collectives
from collective.ops.communication.gate import GraphGates
from collective.ops.graph import graph_analysis


def awaiting(exchanges: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Makes the operation that a run executes before its collectives; [] where none is needed.

    Args:
        exchanges: those of `beside_gradients`, all of which the run must execute.
    """
    if not exchanges:
        return []
    names = [collectives.collective_name(op) for op in exchanges]
    # A run may be prepared where another graph is the default one.
    with exchanges[0].graph.as_default(), tf.init_scope():
        return [native_library.on_host().collective_await_rows(collectives=names)]


def beside_gradients(gates: GraphGates, operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns the exchanges of rows that some exchange of gradients must wait for.

    Left out are those that wait for gradients themselves, as those after a later gate do, and
    those in loops and branches.

    Args:
        gates: the graph's.
        operations: those that a run executes.
    """
    operations = set(operations)
    phases = {op: op.get_attr("phase") for op in operations if _has_phase(op)}
    rows = [
        op
        for op, phase in phases.items()
        if phase == b"rows" and op._get_control_flow_context() is None
    ]
    gradients = [op for op, phase in phases.items() if phase == b"gradients"]
    if not rows or not gradients:
        return []
    first = min(map(gates.level, gradients))
    bits = {op: 1 << i for i, op in enumerate(rows)}
    behind_gradients = 1 << len(rows)
    bits.update((op, behind_gradients) for op in gradients)
    before = graph_analysis.marks_upstream(operations, bits, within=operations)
    free = [op for op in rows if gates.level(op) <= first and not before[op] & behind_gradients]
    waiting = [op for op in free if any(not before[g] & bits[op] for g in gradients)]
    return sorted(waiting, key=lambda op: str(op.name))


def _has_phase(op: tf.Operation) -> bool:
    return op.type in (
        "CollectiveSharedAlltoall",
        "CollectiveSharedAlltoallRows",
        "CollectiveNcclAlltoall",
    )
