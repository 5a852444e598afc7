"""Reduces rows of tables' gradients over all ranks, in as few exchanges as their dependences allow.

    rows of this rank ── reduction over its rows ── allgather ── [N, …] ── the script's reduction

The script's own operation comes last: whoever looks at it sees what is of all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import collectives, gate, graph_analysis


class Reduction(NamedTuple):
    """Describes an operation of a script that reduces rows.

    Attributes:
        op: the operation; its first input has the rows.
        table: the name of a table of whose gradient they are made.
        takings: the numbers of the `tf.gradients` that they come from.
    """

    op: tf.Operation
    table: str
    takings: frozenset[int]


def independent(
    reductions: Sequence[Reduction], taken: set[tf.Operation]
) -> Iterator[list[Reduction]]:
    """Yields reductions that can share an exchange.

    They are of the same gradients, of one type, and none waits for another.

    Args:
        reductions: the operations.
        taken: the operations that give the gradients, which wait for none of these.
    """
    waiting = list(reductions)
    while waiting:
        operations = {each.op for each in waiting}
        ready = []
        for each in waiting:
            before = graph_analysis.walk(
                [x.op for x in each.op.inputs], stop=lambda x: x in taken, control=False
            )
            if not operations & before:
                ready.append(each)
        by_key: dict[Any, list[Reduction]] = {}
        for each in ready:
            key = (sorted(each.takings), _travels_as(each.op.inputs[0].dtype).name)
            by_key.setdefault(str(key), []).append(each)
        yield from by_key.values()
        waiting = [each for each in waiting if each not in ready]


def _travels_as(dtype: tf.DType) -> tf.DType:
    if dtype == tf.bool:
        return tf.uint8
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def reduce_over_ranks(reductions: Sequence[Reduction]) -> None:
    """Gives reductions, in the place of this rank's rows, one row for each rank.

    It is what the reduction makes of that rank's rows. All travel by one exchange.
    """
    sent: list[tf.Tensor] = []
    for op, *_ in reductions:
        sent += _of_this_rank(op)
    dtype = _travels_as(reductions[0].op.inputs[0].dtype)
    flat = tf.concat([tf.reshape(tf.cast(x, dtype), [-1]) for x in sent], 0)
    received = allgather(flat[None], [each.table for each in reductions])
    pieces = iter(
        tf.split(received, [tf.size(x) for x in sent], axis=1, num=len(sent))
        if len(sent) > 1
        else [received]
    )
    numbers = iter(sent)
    for op, *_ in reductions:
        x = next(numbers)
        # [N, …]: each rank's, one below the other.
        ranks = tf.reshape(next(pieces), tf.concat([[-1], tf.shape(x)[1:]], 0))
        if op.type == "Mean":
            next(numbers)
            rows = tf.reduce_sum(next(pieces))
            ranks = tf.reduce_sum(ranks, 0, keepdims=True) / rows
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
    digest = hashlib.blake2b("\n".join(sorted(set(tables))).encode(), digest_size=4).hexdigest()
    sent = tf.cast(x, tf.uint8) if x.dtype == tf.bool else x
    opened = gate.gates_of(tf.get_default_graph()).beside([sent]).zero
    name = collectives.unique_name(f"gradient_parts.{digest}")
    received = collectives.allgather(sent, name, opened)
    return tf.cast(received, tf.bool) if x.dtype == tf.bool else received
