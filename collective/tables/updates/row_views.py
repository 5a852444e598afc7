"""Shows an optimizer some rows of a dynamic table and its slots as if they were all.

An optimizer of Keras that computes with whole variables (Adam's moments decay in all rows) can't do
so with a dynamic table, whose memory is address space for all possible rows:

    rows of the memory ──► values that the optimizer computes with ──► the same rows

The rows are those in use, or, where an optimizer moves no others, those with a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.tables.dynamic_table import DynamicTable
from collective.tables.updates import row_writes
from collective.tables.updates.optimizer_slots import settle


class RowsInView:
    """Holds the values of the rows in view of one variable, [R, D].

    Its methods are those of a variable, and take what they take. They change nothing outside.

    Attributes:
        is_changed: whether the values were assigned.

    Args:
        read: reads the values; called when they are first needed.
    """

    def __init__(self, read: Callable[[], tf.Tensor]):
        self._read, self._values, self.is_changed = read, None, False

    def value(self, *_: Any, **__: Any) -> tf.Tensor:
        if self._values is None:
            self._values = self._read()
        return self._values

    read_value = read_value_no_copy = value

    def _dense_var_to_tensor(self, dtype: Any = None, *_: Any, **__: Any) -> Any:
        value = self.value()
        return value if dtype is None or dtype.is_compatible_with(value.dtype) else NotImplemented

    def assign(self, value: Any, *_: Any, **__: Any) -> tf.Tensor:
        before = self.value()
        values = tf.convert_to_tensor(value, before.dtype)
        values.set_shape(before.shape)
        self._values, self.is_changed = values, True
        return values

    def assign_add(self, delta: Any, *_: Any, **__: Any) -> tf.Tensor:
        return self.assign(self.value() + delta)

    def assign_sub(self, delta: Any, *_: Any, **__: Any) -> tf.Tensor:
        return self.assign(self.value() - delta)

    def scatter_add(self, slices: tf.IndexedSlices, *_: Any, **__: Any) -> tf.Tensor:
        return self._scattered(tf.tensor_scatter_nd_add, slices)

    def scatter_sub(self, slices: tf.IndexedSlices, *_: Any, **__: Any) -> tf.Tensor:
        return self._scattered(tf.tensor_scatter_nd_sub, slices)

    def scatter_update(self, slices: tf.IndexedSlices, *_: Any, **__: Any) -> tf.Tensor:
        return self._scattered(tf.tensor_scatter_nd_update, slices)

    def _scattered(self, scatter: Callable[..., tf.Tensor], slices: tf.IndexedSlices) -> tf.Tensor:
        return self.assign(scatter(self.value(), slices.indices[:, None], slices.values))


def update(
    table: DynamicTable,
    gradient: tf.IndexedSlices,
    all_rows: bool,
    work: Callable[[tf.IndexedSlices], Any],
) -> list[Any]:
    """Lets an optimizer update rows in a view, and writes what it has changed.

    Args:
        table: the table.
        gradient: of its local rows, each once.
        all_rows: whether all rows in use are in the view, or those with a gradient.
        work: updates `table` and its slots, which are in the view, by the gradient of the view.

    Returns:
        What makes the update.
    """
    settled, count = settle(table, gradient, True)
    with (
        tf.device("/cpu:0") if table.bridge is None else contextlib.nullcontext(),
        tf.control_dependencies([settled]),
    ):
        if all_rows:
            rows = tf.range(1, tf.cast(count, tf.int64) + 1)
            places = tf.cast(gradient.indices, tf.int64) - 1
        else:
            rows = tf.cast(tf.identity(gradient.indices), tf.int64)
            places = tf.range(tf.size(rows, out_type=tf.int64))
        shape = tf.stack([tf.size(rows, out_type=tf.int64), table.dim])
        in_view = tf.IndexedSlices(tf.identity(gradient.values), places, shape)
        with _viewing(table, rows) as holders:
            done = work(in_view)
            changed = [(x, x.view.value()) for x in holders if x.view.is_changed]
        written = [row_writes.write(holder, rows, values) for holder, values in changed]
    return [*(x for x in tf.nest.flatten(done) if isinstance(x, tf.Operation)), *written]


@contextlib.contextmanager
def _viewing(table: DynamicTable, rows: tf.Tensor) -> Iterator[list[Any]]:
    """Inside, a table and its slots are their local rows `rows` [R]. Yields them."""

    def reading(holder: Any) -> Callable[[], tf.Tensor]:
        def read() -> tf.Tensor:
            values = row_writes.read(holder, rows)
            values.set_shape([None, holder.dim])
            return values

        return read

    holders = [table, *table.slots]
    for holder in holders:
        holder.view = RowsInView(reading(holder))
    try:
        yield holders
    finally:
        for holder in holders:
            holder.view = None
