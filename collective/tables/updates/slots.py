"""Makes the slots that optimizers have for dynamic tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.tables.dynamic_table import DynamicTable
from collective.tables.rows import row_store
from collective.tables.rows.reserved_variable import ReservedVariable, refusing_method
from collective.tables.rows.row_columns import RowColumn
from collective.tables.table import REFUSED_METHODS, WHOLE_VALUE_METHODS, Named, mark_shard


class Slot(ReservedVariable):
    """Holds an optimizer's slot for a dynamic table: one row for each of the table's.

    Its local rows are read by `ResourceGather`. It is in the table's memory, unless it is made with
    `on_device=False`.

    Attributes:
        table: the table.
        dim: values in a row: D, or another number.
        zero: True if rows start from zeros, which fresh memory is.
    """

    def __init__(
        self,
        table: DynamicTable,
        first: tf.Tensor,
        name: str,
        collections: Sequence[str] | None = None,
        on_device: bool | None = None,
    ):
        if first.shape.rank != 2 or first.shape[0] != 1 or not first.shape[1]:
            raise TableError(
                f"table '{table.op.name}' is dynamic: its slot '{name}' must start from one row, "
                f"such as [1, {table.dim}] or [1, 1], not {first.shape}."
            )
        self.table, self.dim, self._label = table, int(first.shape[1]), name
        self._numpy = first.dtype.as_numpy_dtype
        value = tf.get_static_value(first)
        self.zero = value is not None and not np.asarray(value, np.float64).any()
        self._create(
            name,
            table.capacity + 1,
            self.dim,
            first.dtype.base_dtype,
            self._start,
            [table.source, first],
            False,
            collections,
            on_device=table.bridge is not None if on_device is None else on_device,
        )
        table.slots.append(self)
        mark_shard(self, table)

    def new_column(self, first: np.ndarray | None = None) -> RowColumn:
        return self.table.new_column(self._label, self.dim, self._numpy, first)

    def _start(self, path: str, source: np.ndarray, first: np.ndarray) -> np.ndarray:
        column = None
        if source:
            column = row_store.registered(int(source)).columns.get(self.op.name)
        if column is None:
            column = self.new_column()
        column.first = first[0].copy()
        column.expose(path)
        return row_store.register(column.number, column)

    def column(self, session: Any) -> RowColumn:
        """Returns the memory that the slot has in `session`."""
        column: RowColumn = row_store.registered(self.number_in(session))
        return column

    def settle(self, session: Any, count: int) -> None:
        """Gives rows 1 to `count` the values that they lack in `session`, before they are read."""
        self.column(session).initialize_rows(count)

    @property
    def op(self) -> Any:
        """Returns the operation that holds it; one made eagerly has only its name."""
        return super().op if self._in_graph_mode else Named(self._shared_name)

    def refuse(self, way: str) -> NoReturn:
        raise TableError(
            f"{way} of '{self.op.name}', a slot of the dynamic table '{self.table.op.name}', isn't "
            "possible: its memory is address space for all possible rows. The optimizer "
            "must read and update single rows of it."
        )


def _showing_rows(method: str) -> Any:
    """Returns the inherited method, for the rows in view while there are any."""
    inherited = getattr(ReservedVariable, method)

    def scatter(self: Slot, *args: Any, **kwargs: Any) -> Any:
        if self.view is not None:
            return getattr(self.view, method)(*args, **kwargs)
        return inherited(self, *args, **kwargs)

    return scatter


for _method in ("scatter_add", "scatter_sub", "scatter_update"):
    setattr(Slot, _method, _showing_rows(_method))
for _method, _way in {**WHOLE_VALUE_METHODS, **REFUSED_METHODS}.items():
    # Optimizers update single rows of a slot by these.
    if not _method.startswith(("scatter", "batch_scatter", "_lazy")):
        setattr(Slot, _method, refusing_method(_method, _way))
