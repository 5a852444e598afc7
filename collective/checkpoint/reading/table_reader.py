"""Reads rows of a table in a checkpoint without ranks: all by ascending keys, or some."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain
from collective.checkpoint.files.layout import DYNAMIC, StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle
from collective.checkpoint.reading.compatibility import find_stored_table

# Takes numbers of rows [b] and their values [b, D].
Receive = Callable[[np.ndarray, np.ndarray], None]
BUFFER_BYTES = 128 << 20  # the most memory for all parts of a table together


def open_bundle(path: str) -> Bundle:
    """Opens the whole checkpoint `path`, or the latest one in the folder `path`."""
    return chain.open_whole(chain.prefix_of(path))


def read_stored_table(
    bundle: Bundle,
    name: str,
    block: int,
    frequencies: bool = False,
    last_used: bool = False,
    readers: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
) -> Iterator[tuple[Any, ...]]:
    """Reads a table of an open checkpoint (see `collective.checkpoint.read_table`).

    Args:
        bundle: the checkpoint.
        name, block, frequencies, last_used: as for `read_table`.
        readers: read a static stored table, and a dynamic one with slots, like `read_static` and
            `read_dynamic_tables` of this module with the checkpoint.
    """
    static, dynamic = readers or (
        functools.partial(read_static, bundle),
        functools.partial(read_dynamic_tables, bundle),
    )
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}.")
    stored = find_stored_table(bundle, name)
    if stored is None:
        matrices = (n for n, (_, shape) in bundle.entries.items() if len(shape) == 2)
        tables = sorted(bundle.layout.tables) or sorted(matrices)
        raise ValueError(
            f"checkpoint '{bundle.prefix}' has no table '{name}' (it has: "
            f"{', '.join(tables) or 'none'})."
        )
    companions: list[StoredTable] = []
    if frequencies:
        counts = find_stored_table(bundle, f"{stored.name}/frequency")
        if stored.kind != DYNAMIC or counts is None:
            raise ValueError(
                f"checkpoint '{bundle.prefix}' has no frequencies of '{name}': they are those of "
                "dynamic tables that were saved with TablePolicy(filter_freq=…)."
            )
        companions.append(counts)
    if last_used:
        steps = find_stored_table(bundle, f"{stored.name}/last_used")
        if stored.kind != DYNAMIC or steps is None:
            raise ValueError(
                f"checkpoint '{bundle.prefix}' doesn't tell when rows of table '{name}' were used "
                "last: no option of its policy needed it."
            )
        companions.append(steps)
    if companions:
        blocks = dynamic([stored, *companions], block)
        return ((keys, rows, *(x[:, 0] for x in others)) for keys, (rows, *others) in blocks)
    if stored.kind == DYNAMIC:
        return ((keys, values[0]) for keys, values in dynamic([stored], block))
    return static(stored, block)


class RowFinder:
    """Finds rows of a table by any keys.

    It reads only the slices that contain them. For a dynamic table it keeps the keys of the parts
    that it has read: 8 bytes per row in them.

    Args:
        bundle: the checkpoint.
        stored: a table in it, or a slot.
    """

    def __init__(self, bundle: Bundle, stored: StoredTable):
        self._bundle, self._stored = bundle, stored
        self._keys: dict[int, np.ndarray] = {}

    def keys_of_part(self, part: int) -> np.ndarray:
        """Returns the keys of a part of a dynamic table, ascending."""
        if part not in self._keys:
            entry = self._bundle.layout.keys_entry(self._stored, part)
            self._keys[part] = self._bundle.read_whole(entry)
        return self._keys[part]

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns which of the int64 `keys` [n] exist, bool [n], and rows [n, D].

        Rows of missing keys are zeros.
        """
        stored = self._stored
        rows = np.zeros((len(keys), stored.dim), tf.as_dtype(stored.dtype).as_numpy_dtype)
        if stored.kind == DYNAMIC:
            parts = stored.placement.owner(keys)
            is_there = np.zeros(len(keys), bool)
            places = np.zeros(len(keys), np.int64)
            for part in np.unique(parts):
                of_part = np.flatnonzero(parts == part)
                stored_keys = self.keys_of_part(int(part))
                places[of_part] = np.searchsorted(stored_keys, keys[of_part])
                of_part = of_part[places[of_part] < len(stored_keys)]
                is_there[of_part] = stored_keys[places[of_part]] == keys[of_part]
        else:
            is_there = (keys >= 0) & (keys < stored.count)
            placed = stored.row_placement
            parts, places = placed.owner(keys), placed.row(keys)
        found = np.flatnonzero(is_there)

        def receive(numbers: np.ndarray, values: np.ndarray) -> None:
            rows[found[numbers]] = values

        _read_places(self._bundle, stored, parts[found], places[found], receive)
        return is_there, rows


def read_rows(bundle: Bundle, stored: StoredTable, rows: np.ndarray, receive: Receive) -> None:
    """Reads some rows of a static table or slot, one stored slice at a time.

    Args:
        bundle: the checkpoint.
        stored: the table in it.
        rows: their numbers, int64 [n], each in [0, V).
        receive: called with places in `rows` [b], and the values of these rows [b, D].
    """
    placed = stored.row_placement
    _read_places(bundle, stored, placed.owner(rows), placed.row(rows), receive)


def _read_places(
    bundle: Bundle, stored: StoredTable, parts: np.ndarray, places: np.ndarray, receive: Receive
) -> None:
    """Reads rows by their parts [n] and places there [n]; rows of the same slice together."""
    order = np.lexsort((places, parts))
    slices = np.stack([parts[order], places[order] // stored.block])
    begins = np.flatnonzero((slices[:, 1:] != slices[:, :-1]).any(0)) + 1
    for numbers in np.split(order, begins) if len(order) else []:
        of_slice = places[numbers]
        first = int(of_slice[0])
        entry = bundle.layout.entry(stored, int(parts[numbers[0]]))
        values = bundle.read(entry, first, int(of_slice[-1]) + 1 - first)
        receive(numbers, values[of_slice - first])


class RowCursor:
    """Takes the rows of an entry one after another.

    It holds one stored slice at a time, or `budget` bytes if that is less.

    Attributes:
        place: the number of the next row.
    """

    def __init__(self, bundle: Bundle, entry: str, total: int, block: int, budget: int):
        dtype, shape = bundle.entries[entry]
        row_bytes = max(1, int(np.prod(shape[1:])) * np.dtype(dtype).itemsize)
        self._bundle, self._entry, self._total = bundle, entry, total
        self._step = max(1, min(block, budget // row_bytes))
        self._first, self._rows = 0, bundle.read(entry, 0, 0)
        self.place = 0

    def peek(self) -> np.ndarray:
        """Returns the rows from `place` on that are in memory; none only at the end."""
        if self.place == self._first + len(self._rows) and self.place < self._total:
            # It stops at the end of a slice: reading past it would read two slices.
            count = min(self._step - self.place % self._step, self._total - self.place)
            self._first, self._rows = self.place, self._bundle.read(self._entry, self.place, count)
        return self._rows[self.place - self._first :]

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` rows."""
        pieces = []
        while count > 0:
            piece = self.peek()[:count]
            pieces.append(piece)
            self.place += len(piece)
            count -= len(piece)
        if not pieces:
            return self.peek()[:0]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def read_static(
    bundle: Bundle, stored: StoredTable, block: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Interleaves the parts of a static table, so that rows are in the order of their numbers.

    Yields:
        (the number of the first row, rows [b, D]).
    """
    budget = BUFFER_BYTES // len(stored.parts)
    cursors = [
        RowCursor(bundle, bundle.layout.entry(stored, part), total, stored.block, budget)
        for part, total in enumerate(stored.parts)
    ]
    for first in range(0, stored.count, block):
        count = min(block, stored.count - first)
        rows = np.empty((count, stored.dim), tf.as_dtype(stored.dtype).as_numpy_dtype)
        for part, cursor in enumerate(cursors):
            rows_of_part = rows[stored.row_placement.rows_of(part, first)]
            rows_of_part[...] = cursor.take(len(rows_of_part))
        yield first, rows


def read_dynamic_tables(
    bundle: Bundle,
    stored_tables: list[StoredTable],
    block: int,
    table: StoredTable | None = None,
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Merges the parts of one dynamic table and its slots, each of which has ascending keys.

    Args:
        bundle: a checkpoint.
        stored_tables: the tables whose rows are read.
        block: how many rows to read at a time.
        table: the table with the keys; by default the first of `stored_tables`.

    Yields:
        (keys [b], [rows [b, D] of each stored table]).
    """
    table = stored_tables[0] if table is None else table
    layout, parts = bundle.layout, table.parts
    budget = BUFFER_BYTES // (len(parts) * (len(stored_tables) + 1))
    cursors_by_part = []
    for part, total in enumerate(parts):
        entries = [layout.keys_entry(table, part)]
        entries += [layout.entry(stored, part) for stored in stored_tables]
        cursors_by_part.append([RowCursor(bundle, e, total, table.block, budget) for e in entries])
    pending: list[np.ndarray] = []
    for merged in _merge_parts(cursors_by_part):
        pending = merged if not pending else [np.concatenate(x) for x in zip(pending, merged)]
        while len(pending[0]) >= block:
            yield pending[0][:block], [rows[:block] for rows in pending[1:]]
            pending = [rows[block:] for rows in pending]
    if pending and len(pending[0]):
        yield pending[0], pending[1:]


def _merge_parts(cursors_by_part: list[list[RowCursor]]) -> Iterator[list[np.ndarray]]:
    """Yields [keys, rows of each stored table], merged by ascending keys."""
    while True:
        keys_in_memory = [cursors[0].peek() for cursors in cursors_by_part]
        if not any(len(keys) for keys in keys_in_memory):
            return
        # Up to this key, no part with more rows to come can have a key that is not in memory.
        bound = min(int(keys[-1]) for keys in keys_in_memory if len(keys))
        counts = [int(np.searchsorted(keys, bound, "right")) for keys in keys_in_memory]
        taken = [
            [cursor.take(count) for cursor in cursors]
            for cursors, count in zip(cursors_by_part, counts)
            if count
        ]
        joined = [np.concatenate(pieces) for pieces in zip(*taken)]
        order = np.argsort(joined[0], kind="stable")
        yield [array[order] for array in joined]
