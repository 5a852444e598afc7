"""Defines Adagrad with one accumulator for each row."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.updates import sparse_updates
from collective.train.row_optimizer import RowOptimizer, Rows


class RowWiseAdagradOptimizer(RowOptimizer):
    """Updates by Adagrad with one accumulator for each row, not for each element.

    For a row w of D elements with the gradient g, summed over all occurrences in a batch:

        a ← a + (g₁² + … + g_D²) / D
        w ← w − learning_rate · g / (√a + epsilon)

    The slot `accumulator` is [rows, 1]: a table takes (D + 1) / (2 D) of its memory with Adagrad.
    Rows without a gradient are unchanged. In a variable that isn't a matrix, a row is everything
    after the first dimension; vectors and scalars use plain Adagrad.

    Source: Duchi, Hazan, Singer: "Adaptive subgradient methods", JMLR 2011. It is TorchRec's and
    FBGEMM's `EXACT_ROWWISE_ADAGRAD`, with `initial_accumulator_value=0, epsilon=1e-8` there.

        train = collective.train.RowWiseAdagradOptimizer(0.1).minimize(loss)

    Args:
        learning_rate: a float, a tensor, or a function that returns one.
        initial_accumulator_value: initial value of a row's accumulator, at least 0.
        epsilon: added to the root, at least 0; a float, a tensor or a function. With an initial
            accumulator of 0 it must be positive.
        use_locking: must be false.
        name: of the optimizer and its slots.

    Raises:
        ValueError: an argument has an invalid value.
    """

    def __init__(
        self,
        learning_rate: Any,
        initial_accumulator_value: float = 0.1,
        epsilon: Any = 0.0,
        use_locking: bool = False,
        name: str = "RowWiseAdagrad",
    ):
        if initial_accumulator_value < 0.0:
            raise ValueError(
                f"initial_accumulator_value must be at least 0: {initial_accumulator_value}"
            )
        if isinstance(epsilon, (int, float)) and (
            epsilon < 0.0 or epsilon == initial_accumulator_value == 0.0
        ):
            raise ValueError(
                "epsilon must be at least 0, and positive if initial_accumulator_value is 0: "
                f"{epsilon}"
            )
        super().__init__(use_locking, name, learning_rate=learning_rate, epsilon=epsilon)
        self._initial_accumulator_value = initial_accumulator_value

    def _create_slots(self, variables: Any) -> None:
        for variable in variables:
            self._make_row_slot(
                variable,
                "accumulator",
                self._initial_accumulator_value,
                variable.dtype.base_dtype,
            )

    def _update(self, rows: Rows) -> Any:
        accumulator = self.get_slot(rows.variable, "accumulator")
        rate, epsilon = self._number("learning_rate", rows), self._number("epsilon", rows)
        if rows.are_updated_by_compiled_operations():
            indices = tf.cast(rows.indices, tf.int64)
            return sparse_updates.row_wise_adagrad(
                rows.variable, accumulator, rate, epsilon, rows.gradient, indices
            )
        total = rows.read(accumulator) + rows.mean(tf.square(rows.gradient))
        step = rate * rows.gradient / (tf.sqrt(total) + epsilon)
        return tf.group(rows.write(accumulator, total), rows.subtract(step))
