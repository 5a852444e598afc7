"""Lets Keras's optimizers update rows of tables in a `tf.function` that eager code calls.

Where the optimizer computes with whole variables, these are a dynamic table's rows in use
(`collective.tables.updates.row_views`). New rows begin as in a static table whose row training
hasn't looked up before: moments are 0.

Compiled operations update the rows where there are such (`keras_rules`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.tables.dynamic_table import DynamicTable
from collective.tables.rows import rows_in_file
from collective.tables.table import Table
from collective.tables.updates import row_views, weight_bound
from collective.tensorflow_internals.keras import (
    adadelta,
    adagrad,
    adamax,
    ftrl,
    gradient_descent,
    legacy_adam,
    legacy_nadam,
    package,
    rmsprop,
)
from collective.wrappers import keras_rules

# Legacy optimizers that update the rows that a gradient is of, and no others.
ROW_BY_ROW = (adadelta.Adadelta, adagrad.Adagrad, adamax.Adamax, ftrl.Ftrl, gradient_descent.SGD)
# Those that move all rows, by whole variables.
ALL_ROWS = (legacy_adam.Adam, legacy_nadam.Nadam)


def check(optimizer: Any, tables: Sequence[Any]) -> None:
    """Checks that a new optimizer can update tables.

    Args:
        optimizer: one of `collective.wrappers.keras_updates.BY_ROW`.
        tables: those that it updates, of any kind.

    Raises:
        NotImplementedError: it keeps averages of a dynamic table's weights; or a dynamic table has
            a constraint; or a static one has a constraint that treats rows together.
        TableError: a table has rows in a file, and the optimizer moves rows without a gradient.
    """
    dynamic = [table for table in tables if isinstance(table, DynamicTable)]
    if dynamic and optimizer.use_ema:
        raise NotImplementedError(
            f"{type(optimizer).__name__}(use_ema=True) averages all rows of the dynamic table "
            f"'{dynamic[0].op.name}', also those to come. Leave use_ema out, or give the table its "
            "number of rows."
        )
    for table in tables:
        if table.constraint is not None and not isinstance(table, DynamicTable):
            _check_constraint(table)
    for table in dynamic:
        if _moves_all_rows(optimizer):
            rows_in_file.check_all_rows_are_not_updated(table, optimizer)
        if table.constraint is not None:
            raise NotImplementedError(
                f"The dynamic table '{table.op.name}' has a constraint, which is one of all rows, "
                "also those to come. Leave it out, or give the table its number of rows."
            )


def _check_constraint(table: Table) -> None:
    """Refuses a constraint for which a rank needs rows of other ranks."""
    holds_all_rows = table.row_placement.ranks == 1 or table.row_placement.holder is not None
    if holds_all_rows or _is_by_row(table.constraint, table.shape[1], table.dtype):
        return
    raise NotImplementedError(
        f"The constraint {type(table.constraint).__name__} of the table '{table.op.name}' treats "
        "rows together, and a rank has its own only. Give it axis=1, for the norm of each row "
        "(Keras's axis=0 is that of a column of all rows), or make the table in "
        "embedding_scope(placement='whole')."
    )


def _is_by_row(constraint: Callable[[tf.Tensor], tf.Tensor], dim: int, dtype: tf.DType) -> bool:
    """Tells whether a constraint makes of each row what it makes of the row alone.

    It is tried on random rows of very different lengths, so that bounds of any size apply.
    """
    rows = np.random.default_rng(0).standard_normal((4, dim))
    with tf.init_scope():
        for scale in 10.0 ** np.arange(-6, 7):
            scaled = tf.constant(rows * scale, dtype)
            try:
                together = constraint(scaled).numpy()
                alone = [constraint(scaled[i : i + 1]).numpy() for i in range(len(rows))]
            except (ValueError, tf.errors.InvalidArgumentError):
                return False  # It needs all rows.
            if not np.allclose(together, np.concatenate(alone), 1e-4, 1e-4 * scale):
                return False
    return True


def _moves_all_rows(optimizer: Any) -> bool:
    """Tells whether a new optimizer moves rows without a gradient."""
    kind = type(optimizer)
    if keras_rules.leaves_other_rows(optimizer):
        return False
    if getattr(optimizer, "weight_decay", None):
        return True
    if kind is package.optimizers.SGD:
        return bool(optimizer.momentum)
    return kind is not package.optimizers.Adagrad


@contextlib.contextmanager
def updating(optimizer: Any) -> Iterator[None]:
    """Inside, a new optimizer updates the rows of tables."""
    step, decay = optimizer.update_step, optimizer._apply_weight_decay
    compiled = keras_rules.Updater(optimizer)

    def update_rows(gradient: Any, variable: Any) -> Any:
        if (updated := compiled.update(gradient, variable)) is not None:
            return updated
        if not isinstance(variable, DynamicTable):
            return step(gradient, variable)

        def work(in_view: tf.IndexedSlices) -> Any:
            decay([variable])
            return step(in_view, variable)

        return row_views.update(variable, gradient, _moves_all_rows(optimizer), work)

    def update_step(gradient: Any, variable: Any) -> None:
        update_rows(gradient, variable)
        if variable.constraint is None:  # use_ema averages the rows as they are then.
            _clip(gradient, variable)

    def apply_weight_decay(variables: Sequence[Any]) -> None:
        decay([v for v in variables if not isinstance(v, DynamicTable)])

    with _replacing(optimizer, update_step=update_step, _apply_weight_decay=apply_weight_decay):
        yield


def clip_constrained(grads_and_vars: Sequence[Any]) -> None:
    """Clips the rows of tables with a bound after a new optimizer's update and constraints."""
    for gradient, variable in grads_and_vars:
        if gradient is not None and variable.constraint is not None:
            _clip(gradient, variable)


def _clip(gradient: Any, variable: Any) -> None:
    """Clips the rows of a gradient, after what the function did before, if there is a bound."""
    if weight_bound.has_bound(variable):
        weight_bound.clip_rows(variable, gradient)


def is_possible(optimizer: Any) -> bool:
    """Tells whether a legacy optimizer can update dynamic tables in a function."""
    return type(optimizer) in (*ROW_BY_ROW, *ALL_ROWS, rmsprop.RMSprop)


def updates_in_place(optimizer: Any) -> bool:
    """Tells whether a legacy optimizer's operations update single rows of a table's memory."""
    if type(optimizer) is rmsprop.RMSprop:
        return bool(optimizer._momentum)
    return type(optimizer) in ROW_BY_ROW


@contextlib.contextmanager
def updating_legacy(optimizer: Any) -> Iterator[None]:
    """Inside, a legacy optimizer that computes with whole variables updates dynamic tables."""
    if updates_in_place(optimizer):
        yield
        return
    apply = optimizer._resource_apply_sparse

    def resource_apply_sparse(grad: Any, var: Any, indices: Any, **options: Any) -> Any:
        if not isinstance(var, DynamicTable):
            return apply(grad, var, indices, **options)

        def work(in_view: tf.IndexedSlices) -> Any:
            return apply(in_view.values, var, in_view.indices, **options)

        if all_rows := not keras_rules.leaves_other_rows(optimizer):
            rows_in_file.check_all_rows_are_not_updated(var, optimizer)
        return tf.group(row_views.update(var, tf.IndexedSlices(grad, indices), all_rows, work))

    with _replacing(optimizer, _resource_apply_sparse=resource_apply_sparse):
        yield


@contextlib.contextmanager
def _replacing(owner: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replaces methods of one object meanwhile."""
    for name, method in methods.items():
        object.__setattr__(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(owner, name)
