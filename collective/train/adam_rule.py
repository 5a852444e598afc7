"""Updates rows by Adam's rule, without changing other rows."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.updates import sparse_updates
from collective.train.row_optimizer import Rows


def corrected_rate(rate: tf.Tensor, beta1_power: tf.Tensor, beta2_power: tf.Tensor) -> tf.Tensor:
    """Returns the learning rate with the correction for moments that started from 0."""
    return rate * tf.sqrt(1 - beta2_power) / (1 - beta1_power)


def update_rows(
    rows: Rows,
    m: Any,
    v: Any,
    rate: tf.Tensor,
    beta1: tf.Tensor,
    beta2: tf.Tensor,
    epsilon: tf.Tensor,
) -> Any:
    """Returns an operation that updates rows and their moments.

        m ← beta1 · m + (1 − beta1) · g
        v ← beta2 · v + (1 − beta2) · g²
        w ← w − rate · m / (√v + epsilon)

    Args:
        rows: the rows and their gradient.
        m, v: the slots of the moments.
        rate: the corrected learning rate.
        beta1, beta2, epsilon: scalars of the variable's type.
    """
    gradient = rows.gradient
    if rows.are_updated_by_compiled_operations():
        indices = tf.cast(rows.indices, tf.int64)
        return sparse_updates.lazy_adam(
            rows.variable, m, v, rate, beta1, beta2, epsilon, gradient, indices
        )
    new_m = beta1 * rows.read(m) + (1 - beta1) * gradient
    new_v = beta2 * rows.read(v) + (1 - beta2) * tf.square(gradient)
    step = rate * new_m / (tf.sqrt(new_v) + epsilon)
    return tf.group(rows.write(m, new_m), rows.write(v, new_v), rows.subtract(step))
