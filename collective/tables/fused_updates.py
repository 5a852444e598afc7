"""Chooses the rule of our own by which a table is updated as an optimizer of `tf.train` does.

A rule replaces what an optimizer does with the sparse gradient of one variable:
`Optimizer._resource_apply_sparse`. Numbers that may change, like a learning rate, are read in every
step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import tensorflow.compat.v1 as tf
from tensorflow.python.training import adagrad, adam, ftrl, gradient_descent, momentum, rmsprop

from collective.ops import placement, reduced_updates, shard_gradients, sparse_updates
from collective.ops.gpu import rules
from collective.tables import optimizer_slots
from collective.tables.table import Table


class OptimizerRule(NamedTuple):
    """Describes the update that an optimizer asks for.

    Attributes:
        make_rule: makes the rule of `numbers`, for kernels of a GPU.
        numbers: scalars.
        slots: the slots' names.
        all_rows: True if rows without a gradient change, too.
        compiled: the function of `sparse_updates` that updates one table in the host's memory; it
            is given the table, its slots, the numbers, the gradient and the rows. None if there is
            none.
    """

    make_rule: Callable[..., rules.Rule]
    numbers: Sequence[Any]
    slots: Sequence[str] = ()
    all_rows: bool = False
    compiled: Callable[..., tf.Operation] | None = None


def _gradient_descent(optimizer: Any) -> OptimizerRule:
    return OptimizerRule(rules.SGD, [optimizer._learning_rate_tensor])


def _momentum(optimizer: Any) -> OptimizerRule:
    return OptimizerRule(
        functools.partial(rules.Momentum, nesterov=optimizer._use_nesterov),
        [optimizer._learning_rate_tensor, optimizer._momentum_tensor],
        ["momentum"],
        compiled=functools.partial(sparse_updates.momentum, nesterov=optimizer._use_nesterov),
    )


def _adagrad(optimizer: Any) -> OptimizerRule:
    return OptimizerRule(
        rules.Adagrad,
        [optimizer._learning_rate_tensor],
        ["accumulator"],
        compiled=sparse_updates.adagrad,
    )


def _adam(optimizer: Any) -> OptimizerRule:
    beta1, beta2 = (tf.cast(power, tf.float32) for power in optimizer._get_beta_accumulators())
    rate = tf.cast(optimizer._lr_t, tf.float32) * tf.sqrt(1 - beta2) / (1 - beta1)
    return OptimizerRule(
        functools.partial(rules.Adam, corrected=True),
        [rate, optimizer._beta1_t, optimizer._beta2_t, optimizer._epsilon_t],
        ["m", "v"],
        all_rows=True,
        compiled=sparse_updates.adam,
    )


def _ftrl(optimizer: Any) -> OptimizerRule:
    return OptimizerRule(
        rules.Ftrl,
        [
            optimizer._learning_rate_tensor,
            optimizer._l1_regularization_strength_tensor,
            optimizer._adjusted_l2_regularization_strength_tensor,
            optimizer._l2_shrinkage_regularization_strength_tensor,
            optimizer._learning_rate_power_tensor,
        ],
        ["accum", "linear"],
        compiled=sparse_updates.ftrl,
    )


def _rmsprop(optimizer: Any) -> OptimizerRule:
    numbers = [
        optimizer._learning_rate_tensor,
        optimizer._decay_tensor,
        optimizer._momentum_tensor,
        optimizer._epsilon_tensor,
    ]
    if optimizer._centered:
        return OptimizerRule(rules.CenteredRMSProp, numbers, ["rms", "momentum", "mg"])
    return OptimizerRule(rules.RMSProp, numbers, ["rms", "momentum"])


def update_of(kind: type, rule_of: Callable[[Any], OptimizerRule]) -> Callable[..., Any]:
    """Returns what stands in for an optimizer's sparse update.

    Args:
        kind: the optimizer's class.
        rule_of: gives the rule of an optimizer of this class.
    """
    return functools.partial(_apply, kind, rule_of)


class _PendingUpdate(NamedTuple):
    """Holds an update of one table that waits for those of other tables.

    Attributes:
        slot_row_count: the number of rows that a dynamic table's slots have, beside row 0.
        done: the operation that stands for the update.
    """

    optimizer: Any
    rule_of: Callable[[Any], OptimizerRule]
    table: Table
    gradient: tf.Tensor
    rows: tf.Tensor
    slot_row_count: tf.Tensor | None
    done: tf.Operation


class _Pending(threading.local):
    """Holds what one `apply_gradients` of this thread has met so far.

    Attributes:
        updates: those on a device; None outside.
        rules: the rules of optimizers that update tables in the host's memory, by optimizer.
    """

    updates: list[_PendingUpdate] | None = None
    rules: dict[tuple[int, Any], OptimizerRule] | None = None


_pending = _Pending()


def fuse_updates(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an `Optimizer.apply_gradients` that updates all of its tables in one operation."""

    def apply_gradients(*args: Any, **kwargs: Any) -> Any:
        previous = _pending.updates, _pending.rules
        _pending.updates, _pending.rules = [], {}
        try:
            with reduced_updates.fusing():
                applied = original(*args, **kwargs)
            # A script's optimizer may have others do a part of the work.
            by_rule: dict[tuple[int, Any], list[_PendingUpdate]] = {}
            for update in _pending.updates:
                by_rule.setdefault((id(update.optimizer), update.rule_of), []).append(update)
            for updates in by_rule.values():
                _update(updates)
            return applied
        finally:
            _pending.updates, _pending.rules = previous

    return apply_gradients


def _update(updates: Sequence[_PendingUpdate]) -> None:
    first = updates[0]
    rule = first.rule_of(first.optimizer)
    op = sparse_updates.update(
        rule.make_rule,
        [tf.cast(number, tf.float32) for number in rule.numbers],
        [update.table for update in updates],
        [
            [first.optimizer.get_slot(update.table, name) for name in rule.slots]
            for update in updates
        ],
        [update.gradient for update in updates],
        [update.rows for update in updates],
        [update.slot_row_count if rule.all_rows else None for update in updates],
    )
    for update in updates:
        update.done._add_control_input(op)


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

    Adam hands on, as the last argument, how TensorFlow would add to rows.
    """
    if not _is_possible(kind, variable, gradient):
        if kind is adam.AdamOptimizer and getattr(variable, "slot_row_count", None) is not None:
            return optimizer_slots.update_by_adam(optimizer, gradient, variable, rows)
        return original(optimizer, gradient, variable, rows, *others)
    # The other optimizers get each row once.
    if kind is gradient_descent.GradientDescentOptimizer:
        gradient, rows = shard_gradients.summed(gradient, rows)
    rows = tf.cast(rows, tf.int64)
    if not placement.on_device(variable.hashed):
        rule = _rule_of(optimizer, rule_of)
        return _update_in_host_memory(optimizer, rule, variable, gradient, rows)
    # The identities wait for the control dependencies of this update.
    update = _PendingUpdate(
        optimizer,
        rule_of,
        variable,
        tf.identity(gradient),
        tf.identity(rows),
        variable.slot_row_count if variable.hashed else None,
        tf.no_op(),
    )
    if _pending.updates is None:
        _update([update])
    else:
        _pending.updates.append(update)
    return update.done


def _is_possible(kind: Any, variable: Any, gradient: tf.Tensor) -> bool:
    if not isinstance(variable, Table) or not sparse_updates.is_possible(
        kind.__name__, variable.hashed, variable.dtype, gradient.dtype
    ):
        return False
    # Another optimizer has Adam do its updates: nobody knows how many rows to go over.
    is_uncounted = variable.hashed and variable.slot_row_count is None
    return not (
        is_uncounted and kind is adam.AdamOptimizer and not placement.on_device(variable.hashed)
    )


def _rule_of(optimizer: Any, rule_of: Callable[[Any], OptimizerRule]) -> OptimizerRule:
    """Returns an optimizer's rule: the same numbers for all of its tables, as far as it can be."""
    graph, key = tf.get_default_graph(), (id(optimizer), rule_of)
    if _pending.rules is None or graph._get_control_flow_context() is not None:
        return rule_of(optimizer)
    if key not in _pending.rules:
        _pending.rules[key] = rule_of(optimizer)
    return _pending.rules[key]


def _update_in_host_memory(
    optimizer: Any, rule: OptimizerRule, table: Table, gradient: tf.Tensor, rows: tf.Tensor
) -> tf.Operation:
    assert rule.compiled is not None
    slots = [optimizer.get_slot(table, name) for name in rule.slots]
    numbers = [tf.cast(number, tf.float32) for number in rule.numbers]
    options = {"used": table.slot_row_count} if rule.all_rows and table.hashed else {}
    return rule.compiled(table, *slots, *numbers, gradient, rows, **options)


gradient_descent_update = update_of(gradient_descent.GradientDescentOptimizer, _gradient_descent)
momentum_update = update_of(momentum.MomentumOptimizer, _momentum)
adagrad_update = update_of(adagrad.AdagradOptimizer, _adagrad)
adam_update = update_of(adam.AdamOptimizer, _adam)
ftrl_update = update_of(ftrl.FtrlOptimizer, _ftrl)
rmsprop_update = update_of(rmsprop.RMSPropOptimizer, _rmsprop)
