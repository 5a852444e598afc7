"""Updates rows of shards by operations of our own, where they beat TensorFlow's by measurement.

On a GPU these are kernels. On one thread of a CPU, 26 tables of dimension 128, a thousand rows of
each: see `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops.dispatch import for_tables, operations
from collective.ops.gpu.rules import Rule
from collective.ops.native_library import library, missing
from collective.ops.placement import on_device


def is_possible(optimizer: str, hashed: bool, *dtypes: tf.DType) -> bool:
    """Tells whether rows of these types can be updated here as an optimizer does.

    The optimizer is called by its name in `tf.train`.
    """
    return (
        missing() is None
        and all(dtype.base_dtype == tf.float32 for dtype in dtypes)
        and (on_device(hashed) or optimizer == "AdagradOptimizer")
    )


def update(
    rule: Callable[..., Rule],
    numbers: Sequence[tf.Tensor],
    tables: Sequence[Any],
    slots: Sequence[Sequence[Any]],
    gradients: Sequence[tf.Tensor],
    rows: Sequence[tf.Tensor],
    used: Sequence[tf.Tensor | None] = (),
) -> tf.Operation:
    """Updates rows by `rule`, with kernels of a GPU, where the gradients are.

    Args:
        rule: makes the rule of `numbers`.
        numbers: float32 scalars: the learning rate, …
        tables, slots: variables of T shards, float32 [R, D].
        gradients: T times float32 [K, D].
        rows: T times int64 [K], each at most once.
        used: for each table the last row that there is, int64 scalar: rows 1 to this one are there,
            row 0 isn't. None if all rows are there. By default all rows of all tables are.
    """
    with for_tables([table.op.name for table in tables], False):
        updated: tf.Operation = operations().collective_update(
            rule,
            numbers,
            [table.handle for table in tables],
            [[slot.handle for slot in table_slots] for table_slots in slots],
            gradients,
            rows,
            used,
        )
    return updated


def adagrad(
    table: Any, accumulator: Any, rate: tf.Tensor, gradient: tf.Tensor, rows: tf.Tensor
) -> tf.Operation:
    """Updates rows by Adagrad, as `ResourceSparseApplyAdagrad` does.

        accumulator[rows] += gradient ** 2
        table[rows] -= rate * gradient / sqrt(accumulator[rows])

    Source: Duchi, Hazan, Singer: "Adaptive subgradient methods", JMLR 2011.

    Args:
        table, accumulator: variables of a shard, float32 [R, D].
        rate: float32 scalar.
        gradient: float32 [K, D].
        rows: int64 [K], each at most once.
    """
    return library().collective_sparse_adagrad(
        table.handle, accumulator.handle, rate, gradient, rows
    )
