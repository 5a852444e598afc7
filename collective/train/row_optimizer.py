"""Reads and writes the rows of a variable and of its slots, for optimizers with rules by row.

A rule is written once. It applies to dense gradients, which cover all rows, and to `IndexedSlices`,
which cover some; to replicated variables and to the shards of tables.
"""

from __future__ import annotations

import abc
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.updates import sparse_updates
from collective.tables.table import Table
from collective.tables.updates import row_writes
from collective.tensorflow_internals.variables import resource_variable_ops, variables


class Rows:
    """Is the part of a variable that has a gradient: all of it, or some distinct rows.

    Attributes:
        variable: the variable, or this rank's shard of a table.
        gradient: [K, ...] for K rows; the variable's shape for all of it.
        indices: [K] the rows; None for all of the variable.
    """

    def __init__(self, variable: Any, gradient: tf.Tensor, indices: tf.Tensor | None = None):
        self.variable, self.gradient, self.indices = variable, gradient, indices

    def are_updated_by_compiled_operations(self) -> bool:
        """Tells whether `ops.sparse_updates` can update these rows, which are some of a table's."""
        variable = self.variable
        return (
            self.indices is not None
            and isinstance(variable, Table)
            and sparse_updates.is_compiled(variable.dtype, self.gradient.dtype)
        )

    def cast(self, number: Any) -> tf.Tensor:
        """Returns a number in the type of the variable."""
        return tf.cast(number, self.variable.dtype.base_dtype)

    def read(self, holder: Any) -> tf.Tensor:
        """Returns these rows of `holder`: of the variable, or of a slot of it."""
        if not _is_resource(holder):
            return tf.identity(holder) if self.indices is None else tf.gather(holder, self.indices)
        if self.indices is None:
            return tf.raw_ops.ReadVariableOp(resource=holder.handle, dtype=holder.dtype.base_dtype)
        return row_writes.read(holder, self.indices)

    def write(self, holder: Any, values: tf.Tensor) -> Any:
        """Returns an operation that gives these rows of `holder` new values."""
        if not _is_resource(holder):
            if self.indices is None:
                return tf.assign(holder, values)
            return tf.scatter_update(holder, self.indices, values)
        if self.indices is None:
            return tf.raw_ops.AssignVariableOp(resource=holder.handle, value=values)
        return row_writes.write(holder, self.indices, values)

    def subtract(self, amounts: tf.Tensor) -> Any:
        """Returns an operation that subtracts [K, ...] from these rows of the variable."""
        variable = self.variable
        if not _is_resource(variable):
            if self.indices is None:
                return tf.assign_sub(variable, amounts)
            return tf.scatter_sub(variable, self.indices, amounts)
        if self.indices is None:
            return tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=amounts)
        return row_writes.subtract(variable, self.indices, amounts)

    def sum(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum over each row of `values` [K, ...], of the shape of a slot by row."""
        return tf.reduce_sum(values, axis=self._row_axes(), keepdims=True)

    def mean(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the mean over each row of `values` [K, ...], of the shape of a slot by row."""
        return tf.reduce_mean(values, axis=self._row_axes(), keepdims=True)

    def _row_axes(self) -> list[int]:
        return list(range(1, self.variable.shape.rank))


class RowOptimizer(tf.train.Optimizer, abc.ABC):
    """Updates variables by a rule for their rows.

    A row that occurs in a gradient several times is updated once, by the sum.

    Args:
        use_locking: must be false.
        name: of the optimizer, and of its slots.
        **numbers: the rule's parameters: floats, tensors, or functions without arguments, which are
            called when an update is built.
    """

    def __init__(self, use_locking: bool, name: str, **numbers: Any):
        refuse_locking(name, use_locking)
        super().__init__(use_locking, name)
        self._numbers = numbers
        self._number_tensors: dict[str, tf.Tensor] = {}

    @abc.abstractmethod
    def _update(self, rows: Rows) -> Any:
        """Returns an operation that updates rows, and their slots."""

    def _number(self, name: str, rows: Rows) -> tf.Tensor:
        """Returns one of the numbers, in the type of the variable."""
        return rows.cast(self._number_tensors[name])

    def _prepare(self) -> None:
        for name, number in self._numbers.items():
            value = number() if callable(number) else number
            self._number_tensors[name] = tf.convert_to_tensor(value, name=name)

    def _make_slot(self, variable: Any, name: str, value: float) -> None:
        """Makes a slot of the variable's shape and type that starts from `value`."""
        self._slot_of_shape(variable, name, value, variable.get_shape(), variable.dtype.base_dtype)

    def _make_row_slot(self, variable: Any, name: str, value: float, dtype: tf.DType) -> None:
        """Makes a slot with one number of type `dtype` for each row, which starts from `value`."""
        shape = variable.get_shape()
        row_shape = tf.TensorShape([*shape.as_list()[:1], *[1] * (shape.rank - 1)])
        self._slot_of_shape(variable, name, value, row_shape, dtype)
        _save_as_part(self.get_slot(variable, name), variable)

    def _slot_of_shape(
        self, variable: Any, name: str, value: float, shape: tf.TensorShape, dtype: tf.DType
    ) -> None:
        initializer = tf.constant_initializer(value, dtype=dtype)
        self._get_or_make_slot_with_initializer(
            variable, initializer, shape, dtype, name, self._name
        )

    def _apply_dense(self, gradient: Any, variable: Any) -> Any:
        return self._update(Rows(variable, gradient))

    def _resource_apply_dense(self, gradient: Any, variable: Any) -> Any:
        return self._update(Rows(variable, gradient))

    def _apply_sparse(self, gradient: Any, variable: Any) -> Any:
        return self._update(Rows(variable, gradient.values, gradient.indices))

    def _resource_apply_sparse(self, gradient: Any, variable: Any, indices: Any) -> Any:
        return self._update(Rows(variable, gradient, indices))


def _save_as_part(slot: Any, variable: Any) -> None:
    """Lets a slot by row of a part of a partitioned variable be saved as the same part.

    TensorFlow gives the slot the whole variable's shape. The slot of a part without all columns is
    saved under its own name.
    """
    part = getattr(variable, "_save_slice_info", None)
    if part is None:
        return
    name, columns = slot._save_slice_info.full_name, slot.shape.as_list()[1:]
    slot._save_slice_info = None
    if part.var_shape[1:] == part.full_shape[1:]:
        offsets = [part.var_offset[0], *(0 for _ in columns)]
        full_shape, shape = ([size[0], *columns] for size in (part.full_shape, part.var_shape))
        info = variables.Variable.SaveSliceInfo(name, full_shape, offsets, shape)
        slot._set_save_slice_info(info)


def refuse_locking(name: str, use_locking: bool) -> None:
    """Refuses locks, which updates by several operations could not hold.

    Raises:
        ValueError: `use_locking` is true.
    """
    if use_locking:
        raise ValueError(
            f"{name}: use_locking=True is not possible. Inside strategy.scope() a process takes "
            "one training step at a time, so there is nothing to lock: leave it out."
        )


def _is_resource(holder: Any) -> bool:
    return isinstance(holder, resource_variable_ops.BaseResourceVariable)
