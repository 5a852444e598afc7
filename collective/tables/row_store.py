"""What a session holds of a dynamic table: its keys, and the memory of its rows and slots.

Each column (the rows, a slot) is the buffer of one resource variable, reserved once and taken as
rows are used. A `Column` knows where it lies and writes into it; it is forgotten when its variable
goes. Row 0 belongs to no key and stays zero: it is what an unknown key gets. In the host's memory
this is NumPy only; for a device's see `device_store.py`.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from collective.ops import memory
from collective.ops.keymap import KeyMap
from collective.tables import initializers

RANGE = 1 << 21  # keys that are sorted at once
ROOM = "Train on more ranks, each holds its share; or, where memory is left, set COLLECTIVE_COLUMN_GB (96) higher"

_numbers = itertools.count(1)
_living: dict[int, Any] = {}


def living(number: int) -> Any:
    """The store or column with this number.

    Raises:
        RuntimeError: it is gone.
    """
    try:
        return _living[number]
    except KeyError:
        raise RuntimeError(
            "This memory of a dynamic table is gone: its session is closed, or initialized it anew."
        ) from None


def keep(number: int, thing: Any) -> np.ndarray:
    """An int64 array [1, 1] of `number`, by which `living` finds `thing` for as long as TensorFlow
    has the array's memory.
    """
    array = memory.aligned((1, 1), np.int64)
    array[:] = number
    _living[number] = thing
    weakref.finalize(_bottom(array), _living.pop, number, None)
    return array


@contextlib.contextmanager
def lent(thing: Any) -> Iterator[int]:
    """A number by which `living` finds `thing`, inside."""
    number = next(_numbers)
    _living[number] = thing
    try:
        yield number
    finally:
        del _living[number]


def _bottom(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class RowColumn(abc.ABC):
    """One row of memory for each row of a table: its values, or a slot.

    Attributes:
        number: by which a graph's operations find it.
        first: [D], what a row starts from; None if the store draws it.
        filled: rows 1 … filled have their first value or a later one.
    """

    def __init__(self, first: np.ndarray | None = None):
        self.first = first
        self.filled = 0
        self.number = next(_numbers)
        self._settling = threading.Lock()

    @abc.abstractmethod
    def offer(self, path: str) -> None:
        """TensorFlow may take the memory now, and only once: `settle_in` follows."""

    @abc.abstractmethod
    def settle_in(self) -> None:
        """TensorFlow has taken it, and what it has is this column's memory from now on."""

    @abc.abstractmethod
    def reach(self, count: int) -> None:
        """There is memory for the rows up to `count`.

        Raises:
            MemoryError: there isn't.
        """

    @abc.abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """[b, D], a copy of these [b] rows, while TensorFlow has them."""

    @abc.abstractmethod
    def write(self, rows: np.ndarray | slice, values: np.ndarray) -> None:
        """Gives rows that there is memory for [b, D] values, or all of them the same [D]."""

    def settle(self, count: int) -> None:
        """Rows up to `count` that haven't got their first value yet get it. Fresh memory is zero."""
        with self._settling:  # a row that has been updated must not start anew
            self.reach(count)
            if self.first is not None and self.first.any() and count > self.filled:
                self.write(slice(self.filled + 1, count + 1), self.first)
            self.filled = max(self.filled, count)


class HostColumn(RowColumn):
    """One in the host's memory, which there is as far as it is written."""

    def __init__(self, rows: int, dim: int, dtype: Any, first: np.ndarray | None = None):
        super().__init__(first)
        self._shape, self._dtype = (rows, dim), dtype
        self._region = memory.Region(rows * dim * np.dtype(dtype).itemsize)
        self._hollow: memory.Hollow | None = None

    def offer(self, path: str) -> None:
        """TensorFlow may map the file at `path` now."""
        self._hollow = memory.Hollow(self._region.size, path)

    def settle_in(self) -> None:
        """What TensorFlow has mapped becomes this column's memory, and TensorFlow's to unmap."""
        hollow, self._hollow = self._hollow, None
        if hollow is None:
            raise RuntimeError("this column has settled before")
        try:
            self._region.move_to(hollow.address())
        finally:
            hollow.close()

    def reach(self, count: int) -> None:
        pass

    def read(self, rows: np.ndarray) -> np.ndarray:
        return self._view()[rows]

    def write(self, rows: np.ndarray | slice, values: np.ndarray) -> None:
        self._view()[rows] = values

    def _view(self) -> np.ndarray:
        return self._region.view(*self._shape, dtype=self._dtype)


class Store:
    """The keys of a table on this rank, and its rows.

    Args:
        keys: what numbers them: a `KeyMap`, or what has its functions.
        values: the rows.
        lock: returns what is held while keys are inserted.
        dim: D.
        name: the table's, for errors.
        fill: draws first values, see `collective.tables.initializers`.
    """

    def __init__(
        self,
        keys: Any,
        values: RowColumn,
        lock: Callable[[], contextlib.AbstractContextManager[Any]],
        dim: int,
        name: str,
        fill: initializers.Fill,
    ):
        self.number = next(_numbers)
        self.keys, self.values = keys, values
        self._lock, self._dim, self._name, self._fill = lock, dim, name, fill

    def __len__(self) -> int:
        """How many rows there are; a key whose row found no memory for its values isn't among them."""
        return min(len(self.keys), self.values.filled)

    def rows(self, keys: np.ndarray, insert: bool) -> np.ndarray:
        """int64, the local rows of `keys`; new ones are inserted, or have row 0.

        Raises:
            MemoryError: there is no room for them.
        """
        with self._lock(), self._drawing():
            return self.keys.find_or_insert(keys) if insert else self.keys.find(keys)

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        try:
            yield
        except MemoryError as error:
            raise MemoryError(f"dynamic table '{self._name}': {error}. {ROOM}.") from error
        finally:
            self.draw()

    def draw(self) -> None:
        """After keys have been found or inserted, also where that failed: the rows that are new get
        their first values.
        """
        count = len(self.keys)
        if count <= self.values.filled:
            return
        self.values.reach(count)
        block = max(1, initializers.BLOCK // self._dim)
        for first in range(self.values.filled + 1, count + 1, block):
            last = min(first + block, count + 1)
            self.values.write(
                slice(first, last),
                self._fill(self.keys.keys(first, last).view(np.uint64), self._dim),
            )
            self.values.filled = last - 1

    def put(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Gives `keys` these values, whether new or not. Returns their local rows."""
        with self._lock(), self._drawing():
            self.draw()  # rows that found no memory before
            local = self.keys.find_or_insert(keys)
            self.values.reach(len(self.keys))
            self.values.write(local, rows)
            self.values.filled = max(self.values.filled, len(self.keys))
            return local

    def ascending(self, block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(keys, local rows) of all rows there are now, by ascending keys, at most `block` at a
        time.

        They are sorted by ranges of about `RANGE` keys, found by a sample: memory is bounded, at
        the cost of a pass over all keys for each range.
        """
        count = len(self)
        if count == 0:
            return
        keys = self.keys.keys(1, count + 1)
        ranges = -(-count // RANGE)
        sample = np.sort(keys[:: max(1, count // (1000 * ranges))]) if ranges > 1 else keys[:0]
        ends = [int(sample[len(sample) * i // ranges]) for i in range(1, ranges)]
        for low, high in zip([-(2**63), *ends], [*ends, None]):
            rows = _within(keys, low, high)
            rows = rows[np.argsort(keys[rows])]
            for first in range(0, len(rows), block):
                part = rows[first : first + block]
                yield keys[part], part + 1


def host_store(capacity: int, dim: int, dtype: Any, name: str, fill: initializers.Fill) -> Store:
    """An empty store in the host's memory; arguments as for `Store` and `HostColumn`."""
    lock = threading.RLock()
    return Store(
        KeyMap(capacity), HostColumn(capacity + 1, dim, dtype), lambda: lock, dim, name, fill
    )


def _within(keys: np.ndarray, low: int, high: int | None) -> np.ndarray:
    """int64, the places in `keys` of those in [low, high)."""
    found = []
    for first in range(0, len(keys), RANGE):
        part = keys[first : first + RANGE]
        fits = part >= low
        if high is not None:
            fits &= part < high
        found.append(np.flatnonzero(fits) + first)
    return np.concatenate(found)
