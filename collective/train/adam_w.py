"""Defines Adam with decoupled weight decay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.train.row_optimizer import Rows, refuse_locking


class AdamWOptimizer(tf.train.AdamOptimizer):
    """Updates by Adam after a decay of the weights that doesn't affect the moments.

    In the t-th update of a variable w with the gradient g:

        w ← w − weight_decay · w
        m ← beta1 · m + (1 − beta1) · g
        v ← beta2 · v + (1 − beta2) · g²
        w ← w − learning_rate · √(1 − beta2ᵗ) / (1 − beta1ᵗ) · m / (√v + epsilon)

    `weight_decay` is not multiplied by the learning rate: a schedule of one must also be applied to
    the other. With a sparse gradient, only its rows decay. The rest is `tf.train.AdamOptimizer`,
    which moves all rows of a static or dynamic table in every step. (For embedding variables,
    DeepRec moves only the rows of the batch.)

    The slots `m` and `v` have the variable's shape.

    Source: Loshchilov, Hutter: "Decoupled weight decay regularization", ICLR 2019; DeepRec's
    `tf.train.AdamWOptimizer` and `tf.contrib.opt.AdamWOptimizer`, whose signature it has.

        train = collective.train.AdamWOptimizer(1e-4, 0.001).minimize(loss, decay_var_list=[table])

    Args:
        weight_decay: the fraction of a weight that an update removes: a float, a tensor, or a
            function that returns one.
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
        weight_decay: Any,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-8,
        use_locking: bool = False,
        name: str = "AdamW",
    ):
        refuse_locking("AdamWOptimizer", use_locking)
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)
        self._weight_decay = weight_decay
        self._weight_decay_tensor: tf.Tensor | None = None
        self._decayed: list[Any] | None = None

    def minimize(
        self,
        loss: Any,
        global_step: Any = None,
        var_list: Any = None,
        gate_gradients: Any = tf.train.Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
        decay_var_list: Sequence[Any] | None = None,
    ) -> Any:
        """Makes the update that minimizes `loss`, like `tf.train.Optimizer.minimize`.

        Args:
            loss, global_step, var_list, gate_gradients, aggregation_method: as there.
            colocate_gradients_with_ops, name, grad_loss: as there.
            decay_var_list: the variables that decay, among those that are updated. None for all of
                them.
        """
        with self._decaying(decay_var_list):
            return super().minimize(
                loss,
                global_step,
                var_list,
                gate_gradients,
                aggregation_method,
                colocate_gradients_with_ops,
                name,
                grad_loss,
            )

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: Any = None,
        name: str | None = None,
        decay_var_list: Sequence[Any] | None = None,
    ) -> Any:
        """Makes the update by gradients, like `tf.train.Optimizer.apply_gradients`.

        Args:
            grads_and_vars, global_step, name: as there.
            decay_var_list: the variables that decay, among those that are updated. None for all of
                them.
        """
        with self._decaying(decay_var_list):
            return super().apply_gradients(grads_and_vars, global_step, name)

    @contextlib.contextmanager
    def _decaying(self, variables: Sequence[Any] | None) -> Iterator[None]:
        """Restricts decay to `variables` inside the context; None changes nothing."""
        previous = self._decayed
        if variables is not None:
            self._decayed = list(variables)
        try:
            yield
        finally:
            self._decayed = previous

    def _prepare(self) -> None:
        super()._prepare()
        decay = self._weight_decay
        self._weight_decay_tensor = tf.convert_to_tensor(
            decay() if callable(decay) else decay, name="weight_decay"
        )

    def _decays(self, variable: Any) -> bool:
        return self._decayed is None or any(variable is other for other in self._decayed)

    def _decay(self, rows: Rows) -> tf.Tensor:
        """Returns the part of `rows` that an update removes."""
        return rows.cast(self._weight_decay_tensor)

    @contextlib.contextmanager
    def _after_decay(self, rows: Rows) -> Iterator[None]:
        """Makes the operations inside wait until `rows` have decayed."""
        if not self._decays(rows.variable):
            yield
            return
        # No operation may still have to read the old weights.
        with tf.control_dependencies([rows.gradient]):
            decayed = rows.subtract(self._decay(rows) * rows.read(rows.variable))
        with tf.control_dependencies([decayed]):
            yield

    def _apply_dense(self, gradient: Any, variable: Any) -> Any:
        with self._after_decay(Rows(variable, gradient)):
            return super()._apply_dense(gradient, variable)

    def _resource_apply_dense(self, gradient: Any, variable: Any) -> Any:
        with self._after_decay(Rows(variable, gradient)):
            return super()._resource_apply_dense(gradient, variable)

    def _apply_sparse(self, gradient: Any, variable: Any) -> Any:
        with self._after_decay(Rows(variable, gradient.values, gradient.indices)):
            return super()._apply_sparse(gradient, variable)

    def _resource_apply_sparse(self, gradient: Any, variable: Any, indices: Any) -> Any:
        with self._after_decay(Rows(variable, gradient, indices)):
            return super()._resource_apply_sparse(gradient, variable, indices)
