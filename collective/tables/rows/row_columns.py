"""Holds the columns of a dynamic table: its rows, and each of its slots.

Each is the buffer of one resource variable, which is reserved once and used as rows are added. A
`RowColumn` knows its address and writes into it; it is dropped with its variable.
`device_row_store.py` has columns on a device.
"""

from __future__ import annotations

import abc
import itertools
import threading
from typing import Any

import numpy as np

from collective.ops.rows import memory
from collective.ops.rows.compiled_row_store import CompiledColumn

NORMS_AT_ONCE = 1 << 14  # Rows.

numbers = itertools.count(1)  # Of columns and stores.


class RowColumn(abc.ABC):
    """Holds one row of memory for each row of a table: its values, or a slot.

    Attributes:
        number: its number in a graph's operations.
        first: [D], what a row starts from; None if the store draws it.
        filled: rows 1 … filled have their initial value or a later one.
        holds_last_uses: whether it has the steps of the rows' last uses, [1] int64 each, which a
            store with a file also keeps for the rows there.
    """

    holds_last_uses = False

    def __init__(self, first: np.ndarray | None = None, number: int | None = None):
        self.number = next(numbers) if number is None else number
        self.first = first
        self.filled = 0
        self._initializing = threading.Lock()

    @abc.abstractmethod
    def expose(self, path: str) -> None:
        """Lets TensorFlow take the memory, once; `adopt_mapping` follows."""

    @abc.abstractmethod
    def adopt_mapping(self) -> None:
        """Uses what TensorFlow has mapped as this column's memory from now on."""

    @abc.abstractmethod
    def ensure_capacity(self, count: int) -> None:
        """Takes memory for the rows up to `count`.

        Raises:
            MemoryError: there isn't enough.
        """

    @abc.abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns a copy of these [b] rows, [b, D], while TensorFlow has them."""

    @abc.abstractmethod
    def write(self, rows: np.ndarray | slice, values: np.ndarray) -> None:
        """Gives rows that have memory the values [b, D], or the same [D] to all of them."""

    def close_gaps(self, from_: np.ndarray, to: np.ndarray, before: int, after: int) -> None:
        """Moves rows into gaps, and clears the rows after them as if they never had values.

        Args:
            from_, to: [K] int64 rows that move, and where to.
            before: the number of rows with the gaps.
            after: their number without.
        """
        raise NotImplementedError

    def is_small(self, count: int, threshold: float) -> np.ndarray:
        """Tells for each of rows 1 to `count`, w, whether ½‖w‖² is below a threshold."""
        raise NotImplementedError

    def initialize_rows(self, count: int) -> None:
        """Gives rows up to `count` their initial value, if they lack it. Fresh memory is zero."""
        with self._initializing:  # A row that has been updated must not be initialized again.
            self.ensure_capacity(count)
            if self.first is not None and self.first.any() and count > self.filled:
                self.write(slice(self.filled + 1, count + 1), self.first)
            self.filled = max(self.filled, count)


class HostColumn(RowColumn):
    """Keeps a column in the host's memory, which is allocated as it is written."""

    def __init__(
        self,
        rows: int,
        dim: int,
        dtype: Any,
        first: np.ndarray | None = None,
        number: int | None = None,
    ):
        self._shape, self.dim, self.dtype = (rows, dim), dim, dtype
        super().__init__(first, number)
        self._region = memory.Region(rows * dim * np.dtype(dtype).itemsize)
        self._file: memory.EmptyFile | None = None

    def expose(self, path: str) -> None:
        """Lets TensorFlow map the file at `path`."""
        self._file = memory.EmptyFile(self._region.size, path)

    def adopt_mapping(self) -> None:
        """Moves the memory to where TensorFlow has mapped the file, and leaves it to TensorFlow."""
        file, self._file = self._file, None
        if file is None:
            raise RuntimeError("this column's memory has been mapped before")
        try:
            self._region.move_to(file.address())
        finally:
            file.close()

    def ensure_capacity(self, count: int) -> None:
        pass

    def read(self, rows: np.ndarray) -> np.ndarray:
        return self._view()[rows]

    def write(self, rows: np.ndarray | slice, values: np.ndarray) -> None:
        self._view()[rows] = values

    def close_gaps(self, from_: np.ndarray, to: np.ndarray, before: int, after: int) -> None:
        with self._initializing:
            view = self._view()
            if self.first is not None and self.first.any():
                view[to[from_ > self.filled]] = self.first
                to, from_ = to[from_ <= self.filled], from_[from_ <= self.filled]
            view[to] = view[from_]  # Rows that start from zeros needn't be announced.
            view[after + 1 : before + 1] = 0
            self.filled = min(self.filled, after)

    def view_of(self, count: int) -> np.ndarray:
        """Returns a view of rows 1 to `count`, [count, D], while the column is there."""
        return self._view()[1 : count + 1]

    def is_small(self, count: int, threshold: float) -> np.ndarray:
        found, rows = np.empty(count, bool), self.view_of(count)
        for first in range(0, count, NORMS_AT_ONCE):
            part = slice(first, first + NORMS_AT_ONCE)
            found[part] = is_small(rows[part], threshold, np)
        return found

    def _view(self) -> np.ndarray:
        return self._region.view(*self._shape, dtype=self.dtype)


class CompiledHostColumn(HostColumn):
    """Keeps a column in the host's memory, in which compiled operations write initial values."""

    def __init__(self, rows: int, dim: int, dtype: Any, first: np.ndarray | None = None):
        number = next(numbers)
        self._compiled = CompiledColumn(number, dim * np.dtype(dtype).itemsize)
        super().__init__(rows, dim, dtype, first, number)
        self._compiled.move_to(self._region.address)

    def adopt_mapping(self) -> None:
        super().adopt_mapping()
        self._compiled.move_to(self._region.address)

    @property
    def first(self) -> np.ndarray | None:
        return self._first

    @first.setter
    def first(self, row: np.ndarray | None) -> None:
        self._first = row
        is_zero = row is None or not row.any()
        self._compiled.set_first(None if is_zero else np.asarray(row, self.dtype))

    @property
    def filled(self) -> int:
        return self._compiled.filled

    @filled.setter
    def filled(self, filled: int) -> None:
        self._compiled.filled = filled

    def initialize_rows(self, count: int) -> None:
        self._compiled.initialize_rows(count)


def is_small(rows: Any, threshold: float, xp: Any) -> Any:
    """Tells for each row w of `rows` [R, D] whether ½‖w‖² is below a threshold.

    Sums go from the first element to the last, in double precision, so that a row's sum doesn't
    depend on its place or on where it is computed.

    Args:
        rows: an array of the module `xp`, NumPy's or CuPy's.
        threshold: the threshold.
        xp: the module.
    """
    total = xp.zeros(len(rows))
    for d in range(rows.shape[1]):
        weights = rows[:, d].astype(np.float64)
        total += weights * weights  # A power isn't exact everywhere.
    return total / 2 < threshold
