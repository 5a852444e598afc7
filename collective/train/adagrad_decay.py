"""Defines Adagrad whose accumulators decay, so that old gradients stop counting."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.train.row_optimizer import RowOptimizer, Rows


class AdagradDecayOptimizer(RowOptimizer):
    """Updates by Adagrad with accumulators that decay every `accumulator_decay_step` steps.

    Plain Adagrad's accumulators only grow, until weights no longer move. This optimizer, in the
    update that leads to global step s, for an element w with the gradient g of a row that has
    decayed p times:

        if s div accumulator_decay_step > p:
            a ← max(a · accumulator_decay_rate, initial_accumulator_value)
            p ← p + 1
        a ← a + g²
        w ← w − learning_rate · g / √a

    A row decays when it has a gradient, at most once per update: a row without gradients for many
    periods catches up one decay at a time. Other rows are unchanged.

    The slot `accumulator` has the variable's shape, `accumulator_decay_power` (p) one integer for
    each row. DeepRec's `AdagradDecayOptimizer` takes an integer for each element, of which it uses
    one; the numbers are the same.

    Source: Duchi, Hazan, Singer: "Adaptive subgradient methods", JMLR 2011; DeepRec's
    `tf.train.AdagradDecayOptimizer`, whose signature it has.

        step = tf.train.get_or_create_global_step()
        optimizer = collective.train.AdagradDecayOptimizer(0.1, step)
        train = optimizer.minimize(loss, global_step=step)

    Args:
        learning_rate: a float, a tensor, or a function that returns one.
        global_step: the variable, or a tensor, that counts updates from 0: an integer. Updates must
            increment it (`minimize(…, global_step=…)`), or nothing decays.
        initial_accumulator_value: initial value of accumulators, below which they don't decay;
            positive.
        accumulator_decay_step: the number of steps between decays; positive.
        accumulator_decay_rate: the factor of a decay, between 0 and 1, both excluded.
        use_locking: must be false.
        name: of the optimizer and its slots.

    Raises:
        ValueError: an argument has an invalid value.
    """

    def __init__(
        self,
        learning_rate: Any,
        global_step: Any,
        initial_accumulator_value: float = 0.1,
        accumulator_decay_step: int = 100000,
        accumulator_decay_rate: float = 0.9,
        use_locking: bool = False,
        name: str = "AdagradDecay",
    ):
        if not hasattr(global_step, "dtype") or not global_step.dtype.is_integer:
            raise ValueError(
                f"global_step must be an integer variable or tensor, not {global_step!r}: pass "
                "tf.train.get_or_create_global_step()."
            )
        if initial_accumulator_value <= 0.0:
            raise ValueError(
                f"initial_accumulator_value must be positive: {initial_accumulator_value}"
            )
        if accumulator_decay_step <= 0 or accumulator_decay_step != int(accumulator_decay_step):
            raise ValueError(
                f"accumulator_decay_step must be a positive integer: {accumulator_decay_step}"
            )
        if not 0.0 < accumulator_decay_rate < 1.0:
            raise ValueError(
                f"accumulator_decay_rate must be between 0 and 1: {accumulator_decay_rate}"
            )
        super().__init__(use_locking, name, learning_rate=learning_rate)
        self._global_step = global_step
        self._initial_accumulator_value = initial_accumulator_value
        self._decay_step, self._decay_rate = int(accumulator_decay_step), accumulator_decay_rate
        self._periods: tf.Tensor | None = None

    def _create_slots(self, variables: Any) -> None:
        for variable in variables:
            self._make_slot(variable, "accumulator", self._initial_accumulator_value)
            self._make_row_slot(
                variable, "accumulator_decay_power", 0, self._global_step.dtype.base_dtype
            )

    def _prepare(self) -> None:
        super()._prepare()
        # The update increments the global step after it has read it.
        self._periods = (tf.convert_to_tensor(self._global_step) + 1) // self._decay_step

    def _update(self, rows: Rows) -> Any:
        accumulator = self.get_slot(rows.variable, "accumulator")
        decay_power = self.get_slot(rows.variable, "accumulator_decay_power")
        power, total = rows.read(decay_power), rows.read(accumulator)
        is_due = self._periods > power
        decayed = tf.maximum(
            total * rows.cast(self._decay_rate), rows.cast(self._initial_accumulator_value)
        )
        total = tf.where_v2(is_due, decayed, total) + tf.square(rows.gradient)
        step = self._number("learning_rate", rows) * rows.gradient / tf.sqrt(total)
        return tf.group(
            rows.write(decay_power, power + tf.cast(is_due, power.dtype)),
            rows.write(accumulator, total),
            rows.subtract(step),
        )


class AdagradDecayOptimizerV2(AdagradDecayOptimizer):
    """Is `AdagradDecayOptimizer`, under the name of DeepRec's second version.

    DeepRec's differ only in the memory of one slot: an integer for each row, which both have in
    this library. Each restores the other's checkpoints. `AdagradDecayV2Optimizer` is the same
    class.
    """
