"""Chooses the library's own rule that updates a table like an optimizer of `tf.train`.

A rule replaces an optimizer's update by the sparse gradient of one variable,
`Optimizer._resource_apply_sparse`. Numbers that may change, like a learning rate, are read in every
step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import kernel_device
from collective.ops.exchange import shard_gradients
from collective.ops.graph import device_scopes
from collective.ops.updates import reduced_updates, sparse_updates
from collective.tables.table import Table
from collective.tables.updates import optimizer_slots, row_writes
from collective.tensorflow_internals.optimizers import (
    adagrad,
    adam,
    ftrl,
    gradient_descent,
    momentum,
    rmsprop,
)


class OptimizerRule(NamedTuple):
    """Describes an optimizer's update.

    Attributes:
        name: the end of the compiled operations' names.
        numbers: scalars, the inputs of these operations.
        slots: the slots' names.
        all_rows: True if rows without a gradient change, too.
    """

    name: str
    numbers: Sequence[Any]
    slots: Sequence[str] = ()
    all_rows: bool = False


def _gradient_descent(optimizer: Any) -> OptimizerRule:
    return OptimizerRule("SGD", [optimizer._learning_rate_tensor])


def _momentum(optimizer: Any) -> OptimizerRule:
    return OptimizerRule(
        "NesterovMomentum" if optimizer._use_nesterov else "Momentum",
        [optimizer._learning_rate_tensor, optimizer._momentum_tensor],
        ["momentum"],
    )


def _adagrad(optimizer: Any) -> OptimizerRule:
    return OptimizerRule(
        "Adagrad",
        [optimizer._learning_rate_tensor],
        ["accumulator"],
    )


def _adam(optimizer: Any) -> OptimizerRule:
    beta1, beta2 = (tf.cast(power, tf.float32) for power in optimizer._get_beta_accumulators())
    rate = tf.cast(optimizer._lr_t, tf.float32) * tf.sqrt(1 - beta2) / (1 - beta1)
    return OptimizerRule(
        "Adam",
        [rate, optimizer._beta1_t, optimizer._beta2_t, optimizer._epsilon_t],
        ["m", "v"],
        all_rows=True,
    )


def _ftrl(optimizer: Any) -> OptimizerRule:
    return OptimizerRule(
        "Ftrl",
        [
            optimizer._learning_rate_tensor,
            optimizer._l1_regularization_strength_tensor,
            optimizer._adjusted_l2_regularization_strength_tensor,
            optimizer._l2_shrinkage_regularization_strength_tensor,
            optimizer._learning_rate_power_tensor,
        ],
        ["accum", "linear"],
    )


def _rmsprop(optimizer: Any) -> OptimizerRule:
    numbers = [
        optimizer._learning_rate_tensor,
        optimizer._decay_tensor,
        optimizer._momentum_tensor,
        optimizer._epsilon_tensor,
    ]
    if optimizer._centered:
        return OptimizerRule("CenteredRMSProp", numbers, ["rms", "momentum", "mg"])
    return OptimizerRule("RMSProp", numbers, ["rms", "momentum"])


def update_of(kind: type, rule_of: Callable[[Any], OptimizerRule]) -> Callable[..., Any]:
    """Returns what stands in for an optimizer's sparse update.

    Args:
        kind: the optimizer's class.
        rule_of: gives the rule of an optimizer of this class.
    """
    return functools.partial(_apply, kind, rule_of)


class _Rules(threading.local):
    """Holds the rules of optimizers in one `apply_gradients` of this thread; None outside."""

    by_optimizer: dict[tuple[int, Any], OptimizerRule] | None = None


_rules = _Rules()


def fuse_updates(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an `Optimizer.apply_gradients` that updates many tables in one operation."""

    def apply_gradients(*args: Any, **kwargs: Any) -> Any:
        previous, _rules.by_optimizer = _rules.by_optimizer, {}
        try:
            with reduced_updates.fusing():
                return original(*args, **kwargs)
        finally:
            _rules.by_optimizer = previous

    return apply_gradients


def _apply(
    kind: Any,
    rule_of: Callable[[Any], OptimizerRule],
    original: Any,
    optimizer: Any,
    gradient: Any,
    variable: Any,
    rows: Any,
    *others: Any,
) -> tf.Operation:
    """Updates rows in place of an optimizer's `_resource_apply_sparse`.

    Adam passes, as the last argument, TensorFlow's function that adds to rows.
    """
    if not _is_possible(kind, variable, gradient):
        if kind is adam.AdamOptimizer and getattr(variable, "slot_row_count", None) is not None:
            return optimizer_slots.update_by_adam(optimizer, gradient, variable, rows)
        if row_writes.on_device(variable):
            original, others = _without_scatters(kind, original, others)
        return original(optimizer, gradient, variable, rows, *others)
    # The other optimizers get each row once.
    if kind is gradient_descent.GradientDescentOptimizer:
        gradient, rows = shard_gradients.summed(gradient, rows)
    rows = tf.cast(rows, tf.int64)
    rule = _rule_of(optimizer, rule_of)
    slots = [optimizer.get_slot(variable, name) for name in rule.slots]
    numbers = [tf.cast(number, tf.float32) for number in rule.numbers]
    used = None
    if rule.all_rows:
        used = variable.slot_row_count if variable.hashed else None
        if used is None:
            with device_scopes.on_host():
                used = tf.constant(-1, tf.int64)
    return sparse_updates.update(rule.name, variable, slots, numbers, gradient, rows, used)


def _without_scatters(
    kind: Any, original: Any, others: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns TensorFlow's update and Adam's function, for a table on a GPU (`row_writes`)."""
    if kind is gradient_descent.GradientDescentOptimizer:
        return _descend, others
    return original, (_add_to_slot,) if kind is adam.AdamOptimizer else others


def _descend(optimizer: Any, gradient: Any, variable: Any, rows: Any) -> tf.Operation:
    gradient, rows = shard_gradients.summed(gradient, rows)
    rate = tf.cast(optimizer._learning_rate_tensor, gradient.dtype.base_dtype)
    return row_writes.subtract(variable, rows, rate * gradient)


def _add_to_slot(slot: Any, rows: tf.Tensor, amounts: tf.Tensor) -> tf.Tensor:
    """Returns a whole slot, after amounts were added to some rows."""
    with tf.control_dependencies([row_writes.add(slot, rows, amounts)]):
        return slot.value()


def _is_possible(kind: Any, variable: Any, gradient: tf.Tensor) -> bool:
    if not isinstance(variable, Table) or not sparse_updates.is_possible(
        kind.__name__, variable.hashed, variable.dtype, gradient.dtype
    ):
        return False
    # Another optimizer lets Adam do its updates: the number of rows to go over is unknown.
    is_uncounted = variable.hashed and variable.slot_row_count is None
    return not (
        is_uncounted and kind is adam.AdamOptimizer and not kernel_device.on_device(variable.hashed)
    )


def _rule_of(optimizer: Any, rule_of: Callable[[Any], OptimizerRule]) -> OptimizerRule:
    """Returns an optimizer's rule, with the same numbers for all tables as far as possible."""
    graph, key = tf.get_default_graph(), (id(optimizer), rule_of)
    if _rules.by_optimizer is None or graph._get_control_flow_context() is not None:
        return rule_of(optimizer)
    if key not in _rules.by_optimizer:
        _rules.by_optimizer[key] = rule_of(optimizer)
    return _rules.by_optimizer[key]


gradient_descent_update = update_of(gradient_descent.GradientDescentOptimizer, _gradient_descent)
momentum_update = update_of(momentum.MomentumOptimizer, _momentum)
adagrad_update = update_of(adagrad.AdagradOptimizer, _adagrad)
adam_update = update_of(adam.AdamOptimizer, _adam)
ftrl_update = update_of(ftrl.FtrlOptimizer, _ftrl)
rmsprop_update = update_of(rmsprop.RMSPropOptimizer, _rmsprop)
