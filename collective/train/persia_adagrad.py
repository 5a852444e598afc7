"""Defines Adagrad as PERSIA's embedding servers compute it."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.train.row_optimizer import RowOptimizer, Rows


class PersiaAdagradOptimizer(RowOptimizer):
    """Updates by Adagrad whose accumulator forgets, and whose step comes before the sum.

    For an element w with the gradient g, summed over all occurrences in a batch:

        w ← w − learning_rate · g / √(a + epsilon)
        a ← g_square_momentum · a + g²

    TensorFlow's Adagrad adds g² first. With vectorwise_shared, a row has one accumulator, to which
    the mean of g² over the row is added. A row forgets only when it has a gradient; other rows are
    unchanged. In vectors and scalars every element is a row.

    The slot `accumulator` has the variable's shape, or is [rows, 1] with vectorwise_shared.

    Source: Duchi, Hazan, Singer: "Adaptive subgradient methods", JMLR 2011; PERSIA's
    `persia.embedding.optim.Adagrad`, with its defaults. (PERSIA ignores its `weight_decay`, which
    is left out here.)

        train = collective.train.PersiaAdagradOptimizer(1e-2).minimize(loss)

    Args:
        learning_rate: a float, a tensor, or a function that returns one.
        initial_accumulator_value: initial value of accumulators, at least 0.
        g_square_momentum: the share of an accumulator that stays, from 0 to 1: a float, a tensor or
            a function. 1 forgets nothing.
        epsilon: added under the root, at least 0; a float, a tensor or a function. With an initial
            accumulator of 0 it must be positive.
        vectorwise_shared: whether a row has one accumulator, not one for each element.
        use_locking: must be false.
        name: of the optimizer and its slots.

    Raises:
        ValueError: an argument has an invalid value.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-2,
        initial_accumulator_value: float = 1e-2,
        g_square_momentum: Any = 1.0,
        epsilon: Any = 1e-10,
        vectorwise_shared: bool = False,
        use_locking: bool = False,
        name: str = "PersiaAdagrad",
    ):
        if initial_accumulator_value < 0.0:
            raise ValueError(
                f"initial_accumulator_value must be at least 0: {initial_accumulator_value}"
            )
        if isinstance(g_square_momentum, (int, float)) and not 0.0 <= g_square_momentum <= 1.0:
            raise ValueError(f"g_square_momentum must be from 0 to 1: {g_square_momentum}")
        if isinstance(epsilon, (int, float)) and (
            epsilon < 0.0 or epsilon == initial_accumulator_value == 0.0
        ):
            raise ValueError(
                "epsilon must be at least 0, and positive if initial_accumulator_value is 0: "
                f"{epsilon}"
            )
        super().__init__(
            use_locking,
            name,
            learning_rate=learning_rate,
            g_square_momentum=g_square_momentum,
            epsilon=epsilon,
        )
        self._initial_accumulator_value = initial_accumulator_value
        self._is_shared = vectorwise_shared

    def _create_slots(self, variables: Any) -> None:
        for variable in variables:
            start, dtype = self._initial_accumulator_value, variable.dtype.base_dtype
            if self._is_shared:
                self._make_row_slot(variable, "accumulator", start, dtype)
            else:
                self._make_slot(variable, "accumulator", start)

    def _update(self, rows: Rows) -> Any:
        accumulator = self.get_slot(rows.variable, "accumulator")
        rate, epsilon = self._number("learning_rate", rows), self._number("epsilon", rows)
        before, squares = rows.read(accumulator), tf.square(rows.gradient)
        step = rate * rows.gradient / tf.sqrt(before + epsilon)
        after = before * self._number("g_square_momentum", rows)
        after += rows.mean(squares) if self._is_shared else squares
        return tf.group(rows.write(accumulator, after), rows.subtract(step))
