"""Defines TensorFlow's optimizers that have a different rule for DeepRec's embedding variables.

DeepRec's `KvResourceSparseApply…` kernels update the rows of the batch of an embedding variable.
All other variables have TensorFlow's rule, in DeepRec and here.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective import train
from collective.compat.sok_variables import DynamicVariable
from collective.tables.dynamic_table import DynamicTable
from collective.train.row_optimizer import Rows


class AdamOptimizer(train.LazyAdamOptimizer):
    """`tf.train.AdamOptimizer`, which updates only the batch's rows of an embedding variable.

    For these it works as `collective.train.LazyAdamOptimizer`. The arguments are those of
    `tf.train.AdamOptimizer`; locks, which don't change results, are accepted.
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
        del use_locking
        super().__init__(learning_rate, beta1, beta2, epsilon, name=name)

    def _apply_sparse_shared(
        self, gradient: Any, variable: Any, indices: Any, scatter_add: Any
    ) -> Any:
        is_lazy = isinstance(variable, DynamicTable)
        rule = train.LazyAdamOptimizer if is_lazy else tf.train.AdamOptimizer
        return rule._apply_sparse_shared(self, gradient, variable, indices, scatter_add)


class AdamWOptimizer(train.AdamWOptimizer, AdamOptimizer):
    """`collective.train.AdamWOptimizer`, with DeepRec's rule for embedding variables.

    Only the batch's rows change, by

        w ← w − α · (m / (√v + epsilon) + weight_decay · w)

    α is Adam's corrected learning rate, which is a factor of the decay, too. Every embedding
    variable decays, even with a `decay_var_list`.
    """

    def _decays(self, variable: Any) -> bool:
        return isinstance(variable, DynamicTable) or super()._decays(variable)

    def _decay(self, rows: Rows) -> tf.Tensor:
        decay = super()._decay(rows)
        is_lazy = isinstance(rows.variable, DynamicTable)
        return decay * self._corrected_rate(rows) if is_lazy else decay


class FtrlOptimizer(train.GroupLassoFtrlOptimizer):
    """`tf.train.FtrlOptimizer`, which shrinks whole rows of an embedding variable.

    For these it works as `collective.train.GroupLassoFtrlOptimizer`; with a shrinkage, z and w use
    the square of the gradient with the shrinkage, and n adds up the squares without. The arguments
    are those of `tf.train.FtrlOptimizer`; locks, which don't change results, are accepted.
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
        del use_locking
        super().__init__(
            learning_rate,
            learning_rate_power,
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            False,
            name,
            accum_name,
            linear_name,
            l2_shrinkage_regularization_strength,
            beta,
        )

    def _seen(self, gradient: tf.Tensor, shrunk: tf.Tensor) -> tf.Tensor:
        return shrunk

    def _apply_sparse(self, gradient: Any, variable: Any) -> Any:
        return tf.train.FtrlOptimizer._apply_sparse(self, gradient, variable)

    def _resource_apply_sparse(self, gradient: Any, variable: Any, indices: Any) -> Any:
        # SparseOperationKit's are updated by TensorFlow's rule, element by element.
        of_rows = isinstance(variable, DynamicTable) and not isinstance(variable, DynamicVariable)
        rule = train.GroupLassoFtrlOptimizer if of_rows else tf.train.FtrlOptimizer
        return rule._resource_apply_sparse(self, gradient, variable, indices)
