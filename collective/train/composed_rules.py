"""Updates tables on a GPU by rules for which TensorFlow has kernels on CPUs only.

A rule is composed of TensorFlow's row operations, which have kernels for GPUs. The numbers equal
those of TensorFlow's single operation, except for rounding.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops import kernel_device
from collective.tables.table import Table
from collective.train.row_optimizer import Rows


def _proximal_gradient_descent(optimizer: Any, rows: Rows) -> tf.Operation:
    """Updates rows as `ResourceSparseApplyProximalGradientDescent` does.

        moved = w - rate * gradient
        w = sign(moved) * max(|moved| - rate * l1, 0) / (1 + rate * l2)

    Source: Duchi, Singer: "Efficient learning using forward-backward splitting", NIPS 2009.
    """
    rate, l1, l2 = map(
        rows.cast,
        (
            optimizer._learning_rate_tensor,
            optimizer._l1_regularization_strength_tensor,
            optimizer._l2_regularization_strength_tensor,
        ),
    )
    moved = rows.read(rows.variable) - rate * rows.gradient
    return rows.write(rows.variable, _shrunk(moved, rate * l1) / (1 + rate * l2))


def _adagrad_da(optimizer: Any, rows: Rows) -> tf.Operation:
    """Updates rows as `ResourceSparseApplyAdagradDA` does.

        sum += gradient
        squares += gradient ** 2
        w = -sign(sum) * max(|sum / step| - l1, 0) / (l2 + sqrt(squares) / (step * rate))

    Source: Duchi, Hazan, Singer: "Adaptive subgradient methods", JMLR 2011.
    """
    rate, l1, l2, step = map(
        rows.cast,
        (
            optimizer._learning_rate_tensor,
            optimizer._l1_regularization_strength,
            optimizer._l2_regularization_strength,
            optimizer._global_step_on_worker,
        ),
    )
    sum_, squares = (
        optimizer.get_slot(rows.variable, name)
        for name in ("gradient_accumulator", "gradient_squared_accumulator")
    )
    new_sum = rows.read(sum_) + rows.gradient
    new_squares = rows.read(squares) + tf.square(rows.gradient)
    weights = -_shrunk(new_sum / step, l1) / (l2 + tf.sqrt(new_squares) / (step * rate))
    return tf.group(
        rows.write(sum_, new_sum),
        rows.write(squares, new_squares),
        rows.write(rows.variable, weights),
    )


def _shrunk(x: tf.Tensor, by: tf.Tensor) -> tf.Tensor:
    """Returns `x`, moved towards 0 by a number, but not beyond it."""
    return tf.sign(x) * tf.maximum(tf.abs(x) - by, 0)


def _apply(
    rule: Callable[[Any, Rows], tf.Operation],
    original: Callable[..., Any],
    optimizer: Any,
    gradient: tf.Tensor,
    variable: Any,
    *indices: tf.Tensor,
) -> Any:
    """Stands in for an optimizer's `_resource_apply_sparse` or `_resource_apply_dense`.

    The latter has no `indices`; those of the former name each row once.
    """
    if isinstance(variable, Table) and kernel_device.on_device(variable.hashed):
        return rule(optimizer, Rows(variable, gradient, *indices))
    return original(optimizer, gradient, variable, *indices)


# By the optimizers whose updates they stand in for.
UPDATES = {
    tf.train.AdagradDAOptimizer: functools.partial(_apply, _adagrad_da),
    tf.train.ProximalGradientDescentOptimizer: functools.partial(
        _apply, _proximal_gradient_descent
    ),
}
