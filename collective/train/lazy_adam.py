"""Defines Adam that leaves rows without a gradient alone."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.train import adam_rule
from collective.train.row_optimizer import Rows, refuse_locking


class LazyAdamOptimizer(tf.train.AdamOptimizer):
    """Updates by Adam, but only the rows in a sparse gradient.

    In the t-th update, for the rows w of a sparse gradient g and their moments m and v:

        m ← beta1 · m + (1 − beta1) · g
        v ← beta2 · v + (1 − beta2) · g²
        w ← w − learning_rate · √(1 − beta2ᵗ) / (1 − beta1ᵗ) · m / (√v + epsilon)

    Other rows and their moments are unchanged, whereas `tf.train.AdamOptimizer` updates all rows of
    a table in every step. A dense gradient is applied as by `tf.train.AdamOptimizer`. Steps are
    counted for all variables together.

    The slots `m` and `v` have the variable's shape. With the same name ('Adam') they are those of
    `tf.train.AdamOptimizer`, whose checkpoints it restores.

    Source: Kingma, Ba: "Adam: a method for stochastic optimization", ICLR 2015; TensorFlow 1's
    `tf.contrib.opt.LazyAdamOptimizer`, whose signature it has, and `LazyAdam` of TensorFlow Addons.

        train = collective.train.LazyAdamOptimizer(0.001).minimize(loss)

    Args:
        learning_rate: a float, a tensor, or a function that returns one.
        beta1, beta2: the decays of the moments: a float, a constant tensor, or a function.
        epsilon: added to the root: a float, a tensor or a function.
        use_locking: must be false.
        name: of the optimizer and its slots.

    Raises:
        ValueError: use_locking is true.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ):
        refuse_locking("LazyAdamOptimizer", use_locking)
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)
        self._rates: dict[tf.DType, tf.Tensor] = {}

    def _prepare(self) -> None:
        super()._prepare()
        self._rates = {}

    def _corrected_rate(self, rows: Rows) -> tf.Tensor:
        """Returns the rate of this update, the same tensor for all variables of a type."""
        dtype = rows.variable.dtype.base_dtype
        if dtype not in self._rates:
            powers = (rows.cast(power) for power in self._get_beta_accumulators())
            self._rates[dtype] = adam_rule.corrected_rate(rows.cast(self._lr_t), *powers)
        return self._rates[dtype]

    def _apply_sparse_shared(
        self, gradient: Any, variable: Any, indices: Any, scatter_add: Any
    ) -> Any:
        del scatter_add  # TensorFlow's way to add to rows.
        rows = Rows(variable, gradient, indices)
        return adam_rule.update_rows(
            rows,
            self.get_slot(variable, "m"),
            self.get_slot(variable, "v"),
            self._corrected_rate(rows),
            rows.cast(self._beta1_t),
            rows.cast(self._beta2_t),
            rows.cast(self._epsilon_t),
        )
