"""Reads all rows of a table in a checkpoint by ascending keys, a block at a time, without ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.layout import StoredTable
from collective.checkpoint.tensor_bundle import Bundle

BUFFER_BYTES = 128 << 20  # all parts of a table have so much in memory together


class RowCursor:
    """Takes the rows of an entry one after another.

    It holds a stored slice at a time, or what `budget` bytes hold if this is less.

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
        """Returns the rows from `place` on that are in memory: none only at the end."""
        if self.place == self._first + len(self._rows) and self.place < self._total:
            # It stops at the end of a slice: reading over it would read two.
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
    """Interleaves the parts of a static table: row i is row i div N of part i mod N.

    Yields:
        (the number of the first row, rows [b, D]).
    """
    ranks = len(stored.parts)
    cursors = [
        RowCursor(
            bundle, bundle.layout.entry(stored, part), total, stored.block, BUFFER_BYTES // ranks
        )
        for part, total in enumerate(stored.parts)
    ]
    for first in range(0, stored.count, block):
        count = min(block, stored.count - first)
        rows = np.empty((count, stored.dim), tf.as_dtype(stored.dtype).as_numpy_dtype)
        for part, cursor in enumerate(cursors):
            rows_of_part = rows[(part - first) % ranks :: ranks]
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
        stored_tables: those of which rows are read.
        block: rows at a time.
        table: has the keys; by default the first of `stored_tables`.

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
        # Up to here no part that has more to come can have a key that is not in memory.
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
