"""Updates rows of shards by operations of our own, where they beat TensorFlow's by measurement.

On a GPU these are kernels, one operation for many tables. On a CPU they are compiled
(`ops/native/sparse_updates.cc`): Adagrad, also with one accumulator for each row, momentum, FTRL
and Adam. There it is one operation for each table, or one for all tables that sums their gradients,
too (`ops/reduced_updates.py`). Where the compiled library is missing, and for other types than
float32, TensorFlow's operations do the work. `benchmarks/RESULTS.md` has what it gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.dispatch import for_tables, operations
from collective.ops.gpu.rules import Rule
from collective.ops.placement import on_device
from collective.ops.reduced_updates import RowUpdate, apply

COMPILED = frozenset({"AdagradOptimizer", "AdamOptimizer", "FtrlOptimizer", "MomentumOptimizer"})


def is_possible(optimizer: str, hashed: bool, *dtypes: tf.DType) -> bool:
    """Tells whether rows of these types can be updated here as an optimizer does.

    The optimizer is called by its name in `tf.train`.
    """
    return _fits(*dtypes) and (on_device(hashed) or optimizer in COMPILED)


def is_compiled(hashed: bool, *dtypes: tf.DType) -> bool:
    """Tells whether the compiled operations update rows of these types: in the host's memory."""
    return _fits(*dtypes) and not on_device(hashed)


def _fits(*dtypes: tf.DType) -> bool:
    return native_library.missing() is None and all(
        dtype.base_dtype == tf.float32 for dtype in dtypes
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
    return apply(RowUpdate("Adagrad", table, [accumulator], [rate], gradient, rows))


def row_wise_adagrad(
    table: Any,
    accumulator: Any,
    rate: tf.Tensor,
    epsilon: tf.Tensor,
    gradient: tf.Tensor,
    rows: tf.Tensor,
) -> tf.Operation:
    """Updates rows by Adagrad with one accumulator for each row.

        accumulator[rows] += mean(gradient ** 2)
        table[rows] -= rate * gradient / (sqrt(accumulator[rows]) + epsilon)

    Args:
        table: variable of a shard, float32 [R, D].
        accumulator: its slot, float32 [R, 1].
        rate, epsilon: float32 scalars.
        gradient, rows: as for `adagrad`.
    """
    numbers = [rate, epsilon]
    return apply(RowUpdate("RowWiseAdagrad", table, [accumulator], numbers, gradient, rows))


def momentum(
    table: Any,
    accumulator: Any,
    rate: tf.Tensor,
    decay: tf.Tensor,
    gradient: tf.Tensor,
    rows: tf.Tensor,
    nesterov: bool,
) -> tf.Operation:
    """Updates rows by momentum, as `ResourceSparseApplyMomentum` does.

        accumulator[rows] = decay * accumulator[rows] + gradient
        table[rows] -= rate * accumulator[rows]

    Args:
        table, accumulator: variables of a shard, float32 [R, D].
        rate, decay: float32 scalars; the second one is called momentum, too.
        gradient, rows: as for `adagrad`.
        nesterov: subtracts rate * (gradient + decay * accumulator[rows]) instead.
    """
    rule = "NesterovMomentum" if nesterov else "Momentum"
    return apply(RowUpdate(rule, table, [accumulator], [rate, decay], gradient, rows))


def ftrl(
    table: Any,
    accumulator: Any,
    linear: Any,
    rate: tf.Tensor,
    l1: tf.Tensor,
    l2: tf.Tensor,
    l2_shrinkage: tf.Tensor,
    power: tf.Tensor,
    gradient: tf.Tensor,
    rows: tf.Tensor,
) -> tf.Operation:
    """Updates rows by FTRL, as `ResourceSparseApplyFtrlV2` does.

        sum = accumulator[rows] + gradient ** 2
        change = (sum ** -power - accumulator[rows] ** -power) / rate
        linear[rows] += gradient + 2 * l2_shrinkage * table[rows] - change * table[rows]
        accumulator[rows] = sum
        table[rows] = (clip(linear[rows], -l1, l1) - linear[rows]) / (sum ** -power / rate + 2 * l2)

    Source: McMahan and others: "Ad click prediction: a view from the trenches", KDD 2013.

    Args:
        table, accumulator, linear: variables of a shard, float32 [R, D].
        rate, l1, l2, l2_shrinkage, power: float32 scalars.
        gradient, rows: as for `adagrad`.
    """
    numbers = [rate, l1, l2, l2_shrinkage, power]
    return apply(RowUpdate("Ftrl", table, [accumulator, linear], numbers, gradient, rows))


def lazy_adam(
    table: Any,
    m: Any,
    v: Any,
    rate: tf.Tensor,
    beta1: tf.Tensor,
    beta2: tf.Tensor,
    epsilon: tf.Tensor,
    gradient: tf.Tensor,
    rows: tf.Tensor,
) -> tf.Operation:
    """Updates rows by Adam, and leaves other rows alone.

        m[rows] = beta1 * m[rows] + (1 - beta1) * gradient
        v[rows] = beta2 * v[rows] + (1 - beta2) * gradient ** 2
        table[rows] -= rate * m[rows] / (sqrt(v[rows]) + epsilon)

    Source: Kingma, Ba: "Adam: a method for stochastic optimization", ICLR 2015.

    Args:
        table, m, v: variables of a shard, float32 [R, D].
        rate: float32 scalar, corrected for moments that started from 0.
        beta1, beta2, epsilon: float32 scalars.
        gradient, rows: as for `adagrad`.
    """
    numbers = [rate, beta1, beta2, epsilon]
    return apply(RowUpdate("LazyAdam", table, [m, v], numbers, gradient, rows))


def adam(
    table: Any,
    m: Any,
    v: Any,
    rate: tf.Tensor,
    beta1: tf.Tensor,
    beta2: tf.Tensor,
    epsilon: tf.Tensor,
    gradient: tf.Tensor,
    rows: tf.Tensor,
    used: tf.Tensor | None = None,
) -> tf.Operation:
    """Updates all rows by Adam, those without a gradient by one of zeros.

    That is what `tf.train.AdamOptimizer` does with a sparse gradient.

    Args:
        table, m, v, rate, beta1, beta2, epsilon, gradient, rows: as for `lazy_adam`.
        used: the last row that there is, int64 scalar: rows 1 to this one are there, row 0 isn't.
            None if all rows are there.
    """
    numbers = [rate, beta1, beta2, epsilon]
    used = tf.constant(-1, tf.int64) if used is None else used
    return apply(RowUpdate("Adam", table, [m, v], numbers, gradient, rows, used))
