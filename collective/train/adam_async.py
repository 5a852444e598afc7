"""Defines Adam that keeps the powers of its decays for each variable."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.train import adam_rule
from collective.train.row_optimizer import RowOptimizer, Rows


class AdamAsyncOptimizer(RowOptimizer):
    """Updates by Adam, but only the rows of the batch; each variable counts its own steps.

    In the t-th update of a variable, for every element of a dense gradient, or every row in a
    sparse gradient:

        m ← beta1 · m + (1 − beta1) · g
        v ← beta2 · v + (1 − beta2) · g²
        w ← w − learning_rate · √(1 − beta2ᵗ) / (1 − beta1ᵗ) · m / (√v + epsilon)

    Rows without a gradient, and their moments, are unchanged, whereas `tf.train.AdamOptimizer`
    moves all rows. With `apply_sparse_rmsprop=True`, sparse gradients are applied by RMSProp with
    momentum instead, which doesn't count steps:

        v ← beta2 · v + (1 − beta2) · g²
        m ← beta1 · m + learning_rate · g / √(v + epsilon)
        w ← w − m

    The slots `m` and `v` have the variable's shape; `beta1_power` and `beta2_power` (beta1ᵗ and
    beta2ᵗ) are one number each for the whole variable, the same on every rank. An update counts as
    a step whether or not it has rows on a rank, so results don't depend on the number of ranks.
    (DeepRec's CPU kernel multiplies the powers once for each thread that has rows to update.)

    Source: Kingma, Ba: "Adam: a method for stochastic optimization", ICLR 2015; DeepRec's
    `tf.train.AdamAsyncOptimizer`, whose signature it has.

        train = collective.train.AdamAsyncOptimizer(0.001).minimize(loss)

    Args:
        learning_rate: a float, a tensor, or a function that returns one.
        beta1, beta2: the decays of the moments, in [0, 1): a float, a constant tensor, or a
            function that returns one.
        epsilon: added to the root, or with RMSProp under the root: a float, a tensor or a function.
        use_locking: must be false.
        apply_sparse_rmsprop: whether to apply sparse gradients by RMSProp.
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
        apply_sparse_rmsprop: bool = False,
        name: str = "AdamAsync",
    ):
        super().__init__(
            use_locking,
            name,
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        self._apply_sparse_rmsprop = apply_sparse_rmsprop

    def _create_slots(self, variables: Any) -> None:
        for variable in variables:
            dtype = variable.dtype.base_dtype
            self._make_slot(variable, "m", 0.0)
            self._make_slot(variable, "v", 0.0)
            for beta in ("beta1", "beta2"):
                number = self._numbers[beta]
                power = tf.cast(number() if callable(number) else number, dtype)
                self._get_or_make_slot(variable, power, f"{beta}_power", self._name)

    def _update(self, rows: Rows) -> Any:
        m, v = self.get_slot(rows.variable, "m"), self.get_slot(rows.variable, "v")
        rate, beta1, beta2, epsilon = (
            self._number(name, rows) for name in ("learning_rate", "beta1", "beta2", "epsilon")
        )
        if self._apply_sparse_rmsprop and rows.indices is not None:
            mean_square = beta2 * rows.read(v) + (1 - beta2) * tf.square(rows.gradient)
            step = beta1 * rows.read(m) + rate * rows.gradient / tf.sqrt(mean_square + epsilon)
            return tf.group(rows.write(v, mean_square), rows.write(m, step), rows.subtract(step))
        whole = Rows(rows.variable, rows.gradient)
        slots = [self.get_slot(rows.variable, f"{beta}_power") for beta in ("beta1", "beta2")]
        powers = [whole.read(slot) for slot in slots]
        rate = adam_rule.corrected_rate(rate, *powers)
        updated = adam_rule.update_rows(rows, m, v, rate, beta1, beta2, epsilon)
        # A reference variable is overwritten in place.
        with tf.control_dependencies([updated]):
            return tf.group(
                *(
                    whole.write(slot, power * beta)
                    for slot, power, beta in zip(slots, powers, (beta1, beta2))
                )
            )
