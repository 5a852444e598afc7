"""Gives the compiled rules that update tables as Keras's new optimizers do.

In a `tf.function`, one operation updates all tables that a gradient's sum is of, and computes that
sum (`collective.ops.updates.reduced_updates`). Keras takes nine operations for each table, most of
which go over all of its rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.exchange import shard_gradients
from collective.ops.graph import device_scopes
from collective.ops.updates import reduced_updates, sparse_updates
from collective.tables.dynamic_table import DynamicTable
from collective.tables.table import Table
from collective.tables.updates import optimizer_slots, weight_bound
from collective.tensorflow_internals.keras import package


class _Rule(NamedTuple):
    """Describes an optimizer's update.

    Attributes:
        name: the compiled rule's.
        slots: the optimizer's attributes with a slot for each variable.
        numbers: returns the rule's numbers for an optimizer, computed as the optimizer does.
        all_rows: whether rows without a gradient change, too.
    """

    name: str
    slots: tuple[str, ...]
    numbers: Callable[[Any], list[tf.Tensor]]
    all_rows: bool = False


def _adagrad(optimizer: Any) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(x) for x in (optimizer.learning_rate, optimizer.epsilon)]


def _adam(optimizer: Any) -> list[tf.Tensor]:
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    beta1, beta2 = (tf.constant(x, tf.float32) for x in (optimizer.beta_1, optimizer.beta_2))
    corrected = tf.sqrt(1 - tf.pow(beta2, step)) / (1 - tf.pow(beta1, step))
    rate = tf.cast(optimizer.learning_rate, tf.float32) * corrected
    rests = 1 - optimizer.beta_1, 1 - optimizer.beta_2, optimizer.epsilon
    return [rate, *(tf.constant(x, tf.float32) for x in rests)]


_ADAM = _Rule("KerasAdam", ("_momentums", "_velocities"), _adam, all_rows=True)
_RULES = {
    package.optimizers.Adagrad: _Rule("KerasAdagrad", ("_accumulators",), _adagrad),
    package.optimizers.Adam: _ADAM,
    package.optimizers.AdamW: _ADAM,
}


def _is_plain_adam(optimizer: Any) -> bool:
    """Tells whether Adam is none of its variants, by numbers that don't change."""
    numbers = optimizer.beta_1, optimizer.beta_2, optimizer.epsilon
    is_variant = optimizer.amsgrad or getattr(optimizer, "adaptive_epsilon", False)
    return not is_variant and all(isinstance(x, (int, float)) for x in numbers)


def leave_other_rows(optimizer: Any) -> None:
    """Has an optimizer move only the rows of dynamic tables that a gradient is of."""
    optimizer._collective_leaves_other_rows = True


def leaves_other_rows(optimizer: Any) -> bool:
    """Tells whether `leave_other_rows` was called with an optimizer."""
    return getattr(optimizer, "_collective_leaves_other_rows", False)


class Updater:
    """Updates tables by compiled operations in one `apply_gradients`.

    Args:
        optimizer: a new optimizer of Keras.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._rule = _RULES.get(type(optimizer))
        if self._rule is _ADAM and not _is_plain_adam(optimizer):
            self._rule = None

    @functools.cached_property
    def _numbers(self) -> list[tf.Tensor]:  # once for all tables
        assert self._rule is not None
        return [tf.cast(number, tf.float32) for number in self._rule.numbers(self._optimizer)]

    def update(self, gradient: Any, variable: Any) -> tf.Operation | None:
        """Updates a table's rows; None if Keras has to."""
        if self._rule is None or not _is_possible(gradient, variable):
            return None
        if not isinstance(variable, DynamicTable):
            with device_scopes.on_host():
                all_rows = tf.constant(-1, tf.int64)
            return self._made(self._rule, gradient, variable, all_rows)
        # Keras decays weights before each update: of a dynamic table, those of rows in view.
        if leaves_other_rows(self._optimizer) or self._optimizer.weight_decay:
            return None
        settled, count = optimizer_slots.settle(variable, gradient, self._rule.all_rows)
        with tf.control_dependencies([settled]):
            return self._made(self._rule, gradient, variable, count)

    def _made(self, rule: _Rule, gradient: Any, variable: Any, used: Any) -> tf.Operation:
        number = self._optimizer._index_dict[self._optimizer._var_key(variable)]
        return sparse_updates.update(
            rule.name,
            variable,
            [getattr(self._optimizer, slot)[number] for slot in rule.slots],
            self._numbers,
            gradient.values,
            tf.cast(gradient.indices, tf.int64),
            used if rule.all_rows else None,
        )


def _is_possible(gradient: Any, variable: Any) -> bool:
    return (
        isinstance(variable, Table)
        and isinstance(gradient, tf.IndexedSlices)
        and shard_gradients.is_distinct(gradient.indices)
        and sparse_updates.is_compiled(variable.dtype, gradient.dtype)
    )


def fusing(
    optimizer: Any, grads_and_vars: Sequence[Any]
) -> contextlib.AbstractContextManager[None]:
    """Lets one operation update many tables, unless something comes between their updates.

    Args:
        optimizer: applies the gradients.
        grads_and_vars: the gradients and their variables.
    """
    between = optimizer.use_ema or any(
        variable.constraint is not None or weight_bound.has_bound(variable)
        for gradient, variable in grads_and_vars
        if gradient is not None
    )
    return contextlib.nullcontext() if between else reduced_updates.fusing()
