"""Exchanges what ranks compute from their parts of tables' gradients.

rows of this rank ── reduction ── one row ── allgather ── a row for each rank ── reduction
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.gradients.part_kinds import Part
from collective.ops.communication import collectives, gate
from collective.ops.graph import graph_analysis


def independent(
    reductions: Sequence[tuple[tf.Operation, Part]], taken: set[tf.Operation]
) -> Iterator[list[tuple[tf.Operation, Part]]]:
    """Yields reductions that can share an exchange.

    They have the same gradients and type, and none waits for another.

    Args:
        reductions: the operations.
        taken: the operations that give the gradients, which wait for none of these.
    """
    waiting = list(reductions)
    while waiting:
        operations = {op for op, _ in waiting}
        ready = []
        for op, part in waiting:
            before = graph_analysis.walk(
                [x.op for x in op.inputs], stop=lambda x: x in taken, control=False
            )
            if not operations & before:
                ready.append((op, part))
        by_key: dict[Any, list[tuple[tf.Operation, Part]]] = {}
        for op, part in ready:
            key = (sorted(part.calls), _travels_as(op.inputs[0].dtype).name)
            by_key.setdefault(str(key), []).append((op, part))
        yield from by_key.values()
        done = {op for op, _ in ready}
        waiting = [(op, part) for op, part in waiting if op not in done]


def _travels_as(dtype: tf.DType) -> tf.DType:
    if dtype == tf.bool:
        return tf.uint8
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def reduce_over_ranks(reductions: Sequence[tuple[tf.Operation, Part]]) -> None:
    """Replaces the input of reductions, this rank's rows, by one row for each rank.

    It is the reduction of that rank's rows. One exchange carries all of them.
    """
    sent: list[tf.Tensor] = []
    for op, _ in reductions:
        sent += _of_this_rank(op)
    dtype = _travels_as(reductions[0][0].inputs[0].dtype)
    flat = tf.concat([tf.reshape(tf.cast(x, dtype), [-1]) for x in sent], 0)
    received = allgather(flat[None], [part.table for _, part in reductions])
    pieces = iter(
        tf.split(received, [tf.size(x) for x in sent], axis=1, num=len(sent))
        if len(sent) > 1
        else [received]
    )
    numbers = iter(sent)
    for op, _ in reductions:
        x = next(numbers)
        # [N, …]: the ranks' rows, stacked.
        ranks = tf.reshape(next(pieces), tf.concat([[-1], tf.shape(x)[1:]], 0))
        if op.type == "Mean":
            next(numbers)
            rows = tf.reduce_sum(next(pieces))
            ranks = tf.reduce_sum(ranks, 0, keepdims=True) / rows
            # One row, which TensorFlow is not to know where it knew of another number.
            ranks = ranks[: tf.shape(received)[0]]
        ranks = tf.cast(ranks, op.inputs[0].dtype)
        ranks.set_shape([None, *x.shape[1:].as_list()])
        op._update_input(0, ranks)


def _of_this_rank(op: tf.Operation) -> list[tf.Tensor]:
    """Returns what a reduction makes of this rank's rows, [1, …]; for a mean their number, too."""
    x = op.inputs[0]
    if x.dtype != tf.bool:
        x = tf.cast(x, _travels_as(x.dtype))
    if op.type == "Mean":
        return [tf.reduce_sum(x, 0, keepdims=True), tf.cast(tf.shape(x)[:1], x.dtype)]
    reduce = _REDUCE["EuclideanNorm" if op.type == "L2Loss" else op.type]
    return [reduce(x, 0, keepdims=True)]


_REDUCE = {
    "Sum": tf.reduce_sum,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
    "Prod": tf.reduce_prod,
    "All": tf.reduce_all,
    "Any": tf.reduce_any,
    "EuclideanNorm": tf.math.reduce_euclidean_norm,
}


def allgather(x: tf.Tensor, tables: Sequence[str]) -> tf.Tensor:
    """Returns the rows of all ranks, concatenated.

    Args:
        x: this rank's.
        tables: the names of the tables of whose gradients they are made.
    """
    digest = hashlib.blake2b("\n".join(sorted(set(tables))).encode(), digest_size=4).hexdigest()
    sent = tf.cast(x, tf.uint8) if x.dtype == tf.bool else x
    opened = gate.gates_of(tf.get_default_graph()).of_collective([sent]).zero
    name = collectives.unique_name(f"gradient_parts.{digest}")
    received = collectives.allgather(sent, name, opened)
    return tf.cast(received, tf.bool) if x.dtype == tf.bool else received
