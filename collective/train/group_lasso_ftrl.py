"""Defines FTRL with regularization of whole rows."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.train.row_optimizer import Rows, refuse_locking


class GroupLassoFtrlOptimizer(tf.train.FtrlOptimizer):
    """Updates by FTRL with a group lasso: l1 makes whole rows zero, not single elements.

    For a row w of a sparse gradient g, with its slots n (`accum`) and z (`linear`), and p the
    `learning_rate_power`:

        n' ← n + g²
        z ← z + g + 2 · l2_shrinkage · w − (n'^−p − n^−p) / learning_rate · w
        w ← 0                                               if ‖z‖ ≤ l1
            −z · (1 − l1 / ‖z‖) / (n'^−p / learning_rate + 2 · l2 + beta / learning_rate)  else
        n ← n'

    ‖z‖ is the Euclidean norm of the row: l1 acts on the row as a whole, so rows of features that
    don't help become zero. With rows of one element it equals `tf.train.FtrlOptimizer`. Rows
    without a gradient are unchanged. A dense gradient, which has no rows of features, is applied
    element by element, as by `tf.train.FtrlOptimizer`.

    The slots are those of `tf.train.FtrlOptimizer`, whose checkpoints it restores: `accum` and
    `linear`, of the variable's shape.

    Source: McMahan et al.: "Ad click prediction: a view from the trenches", KDD 2013; Yuan, Lin:
    "Model selection and estimation in regression with grouped variables", J. R. Statist. Soc. B
    2006. It is what DeepRec's `tf.train.FtrlOptimizer` does with embedding variables; with
    `l2_shrinkage_regularization_strength`, n adds up g² as TensorFlow 2's does, where DeepRec's z
    and w see the square of the shrunk gradient.

        train = collective.train.GroupLassoFtrlOptimizer(
            0.1, l1_regularization_strength=2.0).minimize(loss)

    Args:
        learning_rate: a float, or a tensor.
        learning_rate_power: p, at most 0: the learning rate of an element is learning_rate · n^p.
        initial_accumulator_value: initial value of `accum`, at least 0.
        l1_regularization_strength: l1, at least 0, applied to the norm of a row.
        l2_regularization_strength: l2, at least 0.
        use_locking: must be false.
        name: of the optimizer and its slots.
        accum_name, linear_name: of the slots, instead of `name`.
        l2_shrinkage_regularization_strength: l2_shrinkage, at least 0: an l2 penalty on the loss.
        beta: added to l2 after division by 2 · learning_rate.

    Raises:
        ValueError: an argument has an invalid value.
    """

    def __init__(
        self,
        learning_rate: Any,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float | None = None,
    ):
        refuse_locking("GroupLassoFtrlOptimizer", use_locking)
        super().__init__(
            learning_rate,
            learning_rate_power,
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            use_locking,
            name,
            accum_name,
            linear_name,
            l2_shrinkage_regularization_strength,
            beta,
        )

    def _seen(self, gradient: tf.Tensor, shrunk: tf.Tensor) -> tf.Tensor:
        """Returns the gradient whose square the update uses, with shrinkage or without."""
        del shrunk
        return gradient

    def _update(self, rows: Rows) -> Any:
        accum = self.get_slot(rows.variable, "accum")
        linear = self.get_slot(rows.variable, "linear")
        rate, power, l1, l2, shrinkage = (
            rows.cast(number)
            for number in (
                self._learning_rate_tensor,
                self._learning_rate_power_tensor,
                self._l1_regularization_strength_tensor,
                self._adjusted_l2_regularization_strength_tensor,
                self._l2_shrinkage_regularization_strength_tensor,
            )
        )
        weights, squares, gradient = rows.read(rows.variable), rows.read(accum), rows.gradient
        shrunk = gradient + 2 * shrinkage * weights
        inverse_rate = tf.pow(squares + tf.square(self._seen(gradient, shrunk)), -power) / rate
        sigma = inverse_rate - tf.pow(squares, -power) / rate
        z = rows.read(linear) + shrunk - sigma * weights
        norm = tf.sqrt(rows.sum(tf.square(z)))
        is_kept = norm > l1
        kept = 1 - l1 / tf.where_v2(is_kept, norm, tf.ones_like(norm))
        new_weights = tf.where_v2(is_kept, -z * kept / (inverse_rate + 2 * l2), tf.zeros_like(z))
        return tf.group(
            rows.write(accum, squares + tf.square(gradient)),
            rows.write(linear, z),
            rows.write(rows.variable, new_weights),
        )

    def _apply_sparse(self, gradient: Any, variable: Any) -> Any:
        return self._update(Rows(variable, gradient.values, gradient.indices))

    def _resource_apply_sparse(self, gradient: Any, variable: Any, indices: Any) -> Any:
        return self._update(Rows(variable, gradient, indices))
