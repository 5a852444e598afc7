"""Keeps one session's part of a dynamic table: keys, and memory of rows and slots.

`row_columns.py` has the memory. Row 0 belongs to no key and never changes: it is the row of unknown
keys. In the host's memory compiled code finds keys and draws rows
(`collective.ops.rows.compiled_row_store`); without it, NumPy does.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from collective.ops import native_library
from collective.ops.graph.sessions import run_unpatched
from collective.ops.rows import memory
from collective.ops.rows.compiled_row_store import CompiledRowStore
from collective.ops.rows.keymap import KeyMap
from collective.tables.rows import initializers, row_store
from collective.tables.rows.least_recent import LeastRecentRows
from collective.tables.rows.row_columns import CompiledHostColumn, HostColumn, RowColumn, numbers
from collective.tables.rows.statistics import KeyTally

SORTED_AT_ONCE = 1 << 21  # Keys.


def more_memory() -> str:
    """Says what to do where rows have no room."""
    return (
        "Train on more ranks, each holds its share; or, where memory is left, set "
        f"COLLECTIVE_COLUMN_GB ({memory.column_gb():g}) higher"
    )


_registry: dict[int, Any] = {}


def registered(number: int) -> Any:
    """Returns the store or column with this number.

    Raises:
        RuntimeError: it is gone.
    """
    try:
        return _registry[number]
    except KeyError:
        raise RuntimeError(
            "This memory of a dynamic table is gone: its session was closed or initialized again."
        ) from None


def register(number: int, holder: Any) -> np.ndarray:
    """Returns an int64 array [1, 1] with `number`, by which `registered` finds `holder`.

    `holder` is kept for as long as TensorFlow has the array's memory.
    """
    array = memory.aligned((1, 1), np.int64)
    array[:] = number
    _registry[number] = holder
    weakref.finalize(_base_of(array), _registry.pop, number, None)
    return array


@contextlib.contextmanager
def registered_meanwhile(holder: Any) -> Iterator[int]:
    """Registers `holder` under a number inside the context."""
    number = next(numbers)
    _registry[number] = holder
    try:
        yield number
    finally:
        del _registry[number]


def _base_of(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Store:
    """Holds the keys of a table on this rank, and its rows.

    Attributes:
        oldest: finds the least recently used rows.
        tally: counts the keys that are added and removed.

    Args:
        keys: numbers the keys: a `KeyMap`, or an object with its functions.
        values: the rows.
        lock: returns a context that is held while keys are inserted.
        dim: D.
        name: the table's, for errors.
        fill: draws initial values, see `collective.tables.rows.initializers`.
        number: its number in a graph's operations; by default the next one.
    """

    def __init__(
        self,
        keys: Any,
        values: RowColumn,
        lock: Callable[[], contextlib.AbstractContextManager[Any]],
        dim: int,
        name: str,
        fill: initializers.Fill,
        number: int | None = None,
    ):
        self.number = next(numbers) if number is None else number
        self.keys, self.values = keys, values
        self._lock, self._dim, self._name, self._fill = lock, dim, name, fill
        self.oldest, self.tally = LeastRecentRows(), KeyTally()

    @property
    def refused(self) -> int:
        """Returns how often a key was refused a row."""
        return 0

    def __len__(self) -> int:
        """Returns the number of rows; a key whose row got no memory for its values has none."""
        return min(len(self.keys), self.values.filled)

    def rows(self, keys: np.ndarray, insert: bool) -> np.ndarray:
        """Returns the local rows of `keys`, int64; new keys are inserted, or have row 0.

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
            raise MemoryError(f"dynamic table '{self._name}': {error}. {more_memory()}.") from error
        finally:
            self.draw()

    def draw(self) -> None:
        """Gives new rows their initial values, after keys were found or inserted.

        It is also called if that failed.
        """
        count = len(self.keys)
        if count <= self.values.filled:
            return
        self.values.ensure_capacity(count)
        block = max(1, initializers.BLOCK // self._dim)
        for first in range(self.values.filled + 1, count + 1, block):
            last = min(first + block, count + 1)
            self.values.write(
                slice(first, last),
                self._fill(self.keys.keys(first, last).view(np.uint64), self._dim),
            )
            self.values.filled = last - 1

    def put(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Sets the values of new or existing `keys`. Returns their local rows."""
        self.tally.count(self)
        local = self._put(keys, rows)
        self.tally.settle(self)
        self.oldest.forget()
        return local

    def _put(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        with self._lock(), self._drawing():
            self.draw()  # Rows that got no memory before.
            local = self.keys.find_or_insert(keys)
            self.values.ensure_capacity(len(self.keys))
            self.values.write(local, rows)
            self.values.filled = max(self.values.filled, len(self.keys))
            return local

    def remove(self, rows: np.ndarray, slots: Sequence[RowColumn]) -> None:
        """Removes rows; the last rows move into the gaps.

        It must not come between a lookup and the update of what was looked up.

        Args:
            rows: [K] int64, ascending and each once.
            slots: all columns that the table has in addition to its rows.
        """
        self.tally.count(self)
        if len(rows):
            self._remove(rows, slots)
        self.tally.settle(self)

    def _remove(self, rows: np.ndarray, slots: Sequence[RowColumn]) -> None:
        with self._lock(), self._drawing():
            self.draw()  # A row without values could take another's place.
            before = len(self.keys)
            from_, to = self.keys.remove(rows)
            for column in (self.values, *slots):
                column.close_gaps(from_, to, before, before - len(rows))

    def ascending(self, block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (keys, local rows) of all rows by ascending keys, at most `block` at a time.

        The rows are for `read`. For keys in a file they are
        `collective.ops.rows.rows_in_file.IN_FILE`.
        """
        for keys, positions in in_ascending_order(self.keys.keys(1, len(self) + 1), block):
            yield keys, positions + 1

    # -- Rows in memory and in a file (`collective.tables.rows.rows_in_file`). Here all are in
    # memory.

    @property
    def count_in_memory(self) -> int:
        """Returns the number of rows that are in memory, local rows 1 to the last."""
        return len(self)

    def locate(self, keys: np.ndarray) -> np.ndarray:
        """Returns where the rows of `keys` are, int64, without moving a row.

        These are local rows, `collective.ops.rows.rows_in_file.IN_FILE` for keys in the file, and 0
        for unknown keys.
        """
        return self.rows(keys, False)

    def all_keys(self) -> np.ndarray:
        """Returns all keys, int64 [R]: those of local rows 1 to the last, then those in the file.

        It may be a view of memory that the next change overwrites.
        """
        keys: np.ndarray = self.keys.keys(1, len(self) + 1)
        return keys

    def places(self, positions: np.ndarray) -> np.ndarray:
        """Returns where rows are, like `locate`, by the positions of keys in `all_keys`."""
        return positions + 1

    def all_last_uses(self, column: Any) -> np.ndarray:
        """Returns the values of `column`, which holds last uses, for `all_keys`, int64 [R]."""
        last_uses: np.ndarray = column.view_of(self.count_in_memory)[:, 0]
        return last_uses

    def last_uses(self, column: Any, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns the values of `column` for keys, int64 [b].

        Args:
            column: a column that holds last uses.
            keys: [b] int64 that have rows.
            places: [b], their places by `locate`.
        """
        of_rows: np.ndarray = column.view_of(self.count_in_memory)[:, 0]
        return of_rows[places - 1]

    def read(
        self, columns: Sequence[RowColumn], keys: np.ndarray, rows: np.ndarray
    ) -> list[np.ndarray]:
        """Returns copies of the values of `columns` for keys, wherever they are: [b, D] each.

        Args:
            columns: columns of this store's table.
            keys: [b] int64 that have rows.
            rows: [b] their local rows, as `locate` and `ascending` give them.
        """
        return [column.read(rows) for column in columns]

    def remove_keys(self, keys: np.ndarray, slots: Sequence[RowColumn]) -> int:
        """Removes `keys`, as `remove` removes rows; returns how many there were."""
        keys = np.unique(keys)
        places = self.locate(keys)
        return self.remove_at(keys[places > 0], places[places > 0], slots)

    def remove_at(self, keys: np.ndarray, places: np.ndarray, slots: Sequence[RowColumn]) -> int:
        """Removes distinct keys, as `remove` removes rows, at the places given by `locate`.

        Returns how many.
        """
        self.remove(np.sort(places), slots)
        return len(keys)

    def clear(self, slots: Sequence[RowColumn]) -> int:
        """Removes all keys, as `remove` removes rows; returns how many there were."""
        count = len(self)
        self.remove(np.arange(1, count + 1), slots)
        return count

    def limit_memory(self, slots: Sequence[RowColumn]) -> None:
        """Moves rows to the file if too many are in memory. `slots` as for `remove`.

        It must not come between a lookup and the update of what was looked up.
        """

    def keys_in_file(self, block: int) -> Iterator[np.ndarray]:
        """Yields the keys that are in the file as it begins, int64 [b], b <= `block`."""
        return iter(())


class CompiledStore(Store):
    """Holds keys and rows in the host's memory, where compiled operations find and draw them.

    Arguments as for `Store` and `HostColumn`.
    """

    def __init__(self, capacity: int, dim: int, dtype: Any, name: str, fill: initializers.Fill):
        number, values = next(numbers), CompiledHostColumn(capacity + 1, dim, dtype)
        self._compiled = CompiledRowStore(
            number,
            name,
            more_memory(),
            capacity,
            dim,
            dtype,
            values.number,
            initializers.first_values(fill, dim, dtype),
        )
        # Compiled code has a lock of its own.
        super().__init__(self._compiled, values, contextlib.nullcontext, dim, name, fill, number)

    def __len__(self) -> int:
        return self._compiled.count

    @property
    def refused(self) -> int:
        return self._compiled.refused

    def rows(self, keys: np.ndarray, insert: bool) -> np.ndarray:
        return self._compiled.find(keys, insert)

    def _put(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self._compiled.put(keys, rows)

    def _remove(self, rows: np.ndarray, slots: Sequence[RowColumn]) -> None:
        self._compiled.remove(rows, [slot.number for slot in slots])


def in_ascending_order(keys: np.ndarray, block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (keys, positions) of distinct `keys`, ascending, at most `block` at a time.

    They are sorted by ranges of about `SORTED_AT_ONCE` keys, found by a sample: memory is bounded,
    at the cost of a pass over all keys for each range.
    """
    count = len(keys)
    if count == 0:
        return
    ranges = -(-count // SORTED_AT_ONCE)
    sample = np.sort(keys[:: max(1, count // (1000 * ranges))]) if ranges > 1 else keys[:0]
    ends = [int(sample[len(sample) * i // ranges]) for i in range(1, ranges)]
    for low, high in zip([-(2**63), *ends], [*ends, None]):
        positions = _positions_between(keys, low, high)
        positions = positions[np.argsort(keys[positions])]
        for first in range(0, len(positions), block):
            part = positions[first : first + block]
            yield keys[part], part


def is_compiled() -> bool:
    """Tells whether compiled operations work on tables in the host's memory."""
    return native_library.missing() is None


def host_store(
    capacity: int, dim: int, dtype: Any, name: str, fill: initializers.Fill, compiled: bool = True
) -> Store:
    """Makes an empty store in the host's memory; arguments as for `Store` and `HostColumn`.

    Args:
        compiled: with False, NumPy draws rows, because the compiled operations are missing.
    """
    if compiled:
        return CompiledStore(capacity, dim, dtype, name, fill)
    lock = threading.RLock()
    return Store(
        KeyMap(capacity), HostColumn(capacity + 1, dim, dtype), lambda: lock, dim, name, fill
    )


def host_column(rows: int, dim: int, dtype: Any, first: Any, compiled: bool) -> HostColumn:
    """Makes a column in the host's memory; arguments as for `HostColumn` and `host_store`."""
    return (CompiledHostColumn if compiled else HostColumn)(rows, dim, dtype, first)


def local_counts(session: Any, tables: Sequence[Any]) -> list[int]:
    """Returns the number of rows of each table on this rank in `session`, by one run.

    Raises:
        tf.errors.FailedPreconditionError: a table isn't initialized.
    """
    if not tables:
        return []
    numbers = run_unpatched(session, [table.number for table in tables])
    return [len(registered(int(number))) for number in numbers]


def _positions_between(keys: np.ndarray, low: int, high: int | None) -> np.ndarray:
    """Returns the positions in `keys` of those in [low, high), int64."""
    positions = []
    for first in range(0, len(keys), SORTED_AT_ONCE):
        part = keys[first : first + SORTED_AT_ONCE]
        is_between = part >= low
        if high is not None:
            is_between &= part < high
        positions.append(np.flatnonzero(is_between) + first)
    return np.concatenate(positions)


class Loading:
    """Collects rows and slots of a table until they replace those of a session.

    Args:
        table: the `collective.tables.dynamic_table.DynamicTable`.
        slots: its slots that are read.

    Attributes:
        store: the keys and rows that were added.
        columns: the memory of the slots, by their names.
    """

    def __init__(self, table: Any, slots: Sequence[Any]):
        self._table = table
        self.store: row_store.Store = table.new_store()
        self.columns = {slot.op.name: slot.new_column() for slot in slots}

    def add(self, keys_: np.ndarray, rows: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        """Adds keys that this rank owns, with their rows.

        Args:
            keys_: [b] int64.
            rows: [b, D].
            slots: [b, D] of every slot, by its name.
        """
        local = self.store.put(keys_, rows)
        count = self.store.count_in_memory
        for name, column in self.columns.items():
            column.ensure_capacity(count)
            column.write(local, slots[name])
            column.filled = count
        self.store.limit_memory(list(self.columns.values()))

    def remove(self, choose: Callable[[np.ndarray], np.ndarray]) -> None:
        """Removes keys that were added.

        Args:
            choose: called with keys [K] int64; returns the keys to remove (and possibly other
                keys).
        """
        keys_ = choose(self.store.all_keys().copy())
        self.store.remove_keys(keys_, list(self.columns.values()))

    def assign(self, session: Any) -> None:
        """Replaces the table and all of its slots in `session`.

        A slot that wasn't read starts fresh.
        """
        with row_store.registered_meanwhile(self) as number:
            run_unpatched(
                session,
                [v.initializer for v in (self._table, *self._table.slots)],
                {self._table.source: number},
            )
