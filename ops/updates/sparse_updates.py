"""Updates rows of shards with our own operations, where they measurably beat TensorFlow's.

They are compiled. On a CPU (`ops/native/sparse_updates.cc`) an operation updates one table, or all
tables whose gradients it also sums (`ops/updates/reduced_updates.py`). On a GPU
(`ops/native/gpu/update.cc`) one operation launches a kernel for many tables, and there are also
plain gradient descent and RMSProp. TensorFlow's operations do the work if the compiled library is
missing, and for other types than float32. `benchmarks/RESULTS.md` has the gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.kernel_device import on_device
from collective.ops.updates.reduced_updates import RowUpdate, apply

COMPILED = frozenset({"AdagradOptimizer", "AdamOptimizer", "FtrlOptimizer", "MomentumOptimizer"})


def is_possible(optimizer: str, hashed: bool, *dtypes: tf.DType) -> bool:
    """Tells whether rows of these types can be updated here as an optimizer does.

    `optimizer` is its name in `tf.train`.
    """
    return is_compiled(*dtypes) and (on_device(hashed) or optimizer in COMPILED)


def is_compiled(*dtypes: tf.DType) -> bool:
    """Tells whether the compiled operations update rows of these types."""
    return native_library.missing() is None and all(
        dtype.base_dtype == tf.float32 for dtype in dtypes
    )


def update(
    rule: str,
    table: Any,
    slots: Sequence[Any],
    numbers: Sequence[tf.Tensor],
    gradient: tf.Tensor,
    rows: tf.Tensor,
    used: tf.Tensor | None = None,
) -> tf.Operation:
    """Updates rows by a rule, on the device where the table is.

    Args:
        rule: its name in `ops/native/update_rules.h`, or for a GPU in `gpu/rules.h` there.
        table, slots: variables of a shard, float32 [R, D].
        numbers: float32 scalars: the learning rate, …
        gradient: float32 [K, D].
        rows: int64 [K], each at most once.
        used: see `adam`, for which it is needed.
    """
    is_on_device = on_device(getattr(table, "hashed", False))
    return apply(RowUpdate(rule, table, slots, numbers, gradient, rows, used, is_on_device))


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
    return update("Adagrad", table, [accumulator], [rate], gradient, rows)


def keras_adagrad(
    table: Any,
    accumulator: Any,
    rate: tf.Tensor,
    epsilon: tf.Tensor,
    gradient: tf.Tensor,
    rows: tf.Tensor,
) -> tf.Operation:
    """Updates rows by Adagrad, as `tf.keras.optimizers.Adagrad` does.

        accumulator[rows] += gradient ** 2
        table[rows] -= rate * gradient / sqrt(accumulator[rows] + epsilon)

    Args:
        table, accumulator: variables of a shard, float32 [R, D].
        rate, epsilon: float32 scalars.
        gradient, rows: as for `adagrad`.
    """
    return update("KerasAdagrad", table, [accumulator], [rate, epsilon], gradient, rows)


def row_wise_adagrad(
    table: Any,
    accumulator: Any,
    rate: tf.Tensor,
    epsilon: tf.Tensor,
    gradient: tf.Tensor,
    rows: tf.Tensor,
) -> tf.Operation:
    """Updates rows by Adagrad with one accumulator per row.

        accumulator[rows] += mean(gradient ** 2)
        table[rows] -= rate * gradient / (sqrt(accumulator[rows]) + epsilon)

    Args:
        table: variable of a shard, float32 [R, D].
        accumulator: its slot, float32 [R, 1].
        rate, epsilon: float32 scalars.
        gradient, rows: as for `adagrad`.
    """
    numbers = [rate, epsilon]
    return update("RowWiseAdagrad", table, [accumulator], numbers, gradient, rows)


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
    return update(rule, table, [accumulator], [rate, decay], gradient, rows)


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
    return update("Ftrl", table, [accumulator, linear], numbers, gradient, rows)


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
    """Updates rows by Adam, and leaves other rows unchanged.

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
    return update("LazyAdam", table, [m, v], numbers, gradient, rows)


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
    """Updates all rows by Adam; rows without a gradient as if their gradient were zero.

    That is what `tf.train.AdamOptimizer` does with a sparse gradient.

    Args:
        table, m, v, rate, beta1, beta2, epsilon, gradient, rows: as for `lazy_adam`.
        used: the last existing row, int64 scalar: rows 1 to this one exist, row 0 doesn't. None if
            all rows exist.
    """
    numbers = [rate, beta1, beta2, epsilon]
    used = tf.constant(-1, tf.int64) if used is None else used
    return update("Adam", table, [m, v], numbers, gradient, rows, used)


def keras_adam(
    table: Any,
    m: Any,
    v: Any,
    rate: tf.Tensor,
    rest1: tf.Tensor,
    rest2: tf.Tensor,
    epsilon: tf.Tensor,
    gradient: tf.Tensor,
    rows: tf.Tensor,
    used: tf.Tensor | None = None,
) -> tf.Operation:
    """Updates all rows by Adam, as `tf.keras.optimizers.Adam` does.

    Args:
        table, m, v, rate, epsilon, gradient, rows, used: as for `adam`.
        rest1, rest2: 1 - beta1 and 1 - beta2, computed in double precision.
    """
    numbers = [rate, rest1, rest2, epsilon]
    used = tf.constant(-1, tf.int64) if used is None else used
    return update("KerasAdam", table, [m, v], numbers, gradient, rows, used)
