"""All rows of a table in a checkpoint, in the order of their keys, a block at a time: no ranks are
needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.compatibility import column_of
from collective.checkpoint.layout import DYNAMIC, StoredTable
from collective.checkpoint.tensor_bundle import Bundle

BUFFER = 128 << 20  # bytes that all parts of a table have in memory together


def open_bundle(path: str) -> Bundle:
    """The checkpoint `path`, or the latest one in the folder `path`."""
    if tf.io.gfile.isdir(path):
        latest = tf.train.latest_checkpoint(path)
        if latest is None:
            raise ValueError(f"There is no checkpoint in '{path}'.")
        path = latest
    return Bundle(path)


def rows(path: str, name: str, block: int) -> Iterator[tuple[Any, np.ndarray]]:
    """See `collective.checkpoint.read_table`."""
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}.")
    bundle = open_bundle(path)
    column = column_of(bundle, name)
    if column is None:
        tables = sorted(bundle.layout.columns) or sorted(
            n for n, (_, shape) in bundle.entries.items() if len(shape) == 2
        )
        raise ValueError(
            f"checkpoint '{bundle.prefix}' has no table '{name}' (it has: "
            f"{', '.join(tables) or 'none'})."
        )
    if column.kind == DYNAMIC:
        return merged(bundle, [column], block, lambda keys, values: (keys, values[0]))
    return _interleaved(bundle, column, block)


class Cursor:
    """Rows of an entry one after another, read a stored slice, or what `budget` bytes hold, at a
    time.
    """

    def __init__(self, bundle: Bundle, entry: str, total: int, block: int, budget: int):
        dtype, shape = bundle.entries[entry]
        row = max(1, int(np.prod(shape[1:])) * np.dtype(dtype).itemsize)
        self._bundle, self._entry, self._total = bundle, entry, total
        self._step = max(1, min(block, budget // row))
        self._first, self._held = 0, bundle.read(entry, 0, 0)
        self.place = 0

    def peek(self) -> np.ndarray:
        """The rows from `place` on that are in memory: none only at the end."""
        if self.place == self._first + len(self._held) and self.place < self._total:
            # Up to the end of a slice: reading over it would read two.
            count = min(self._step - self.place % self._step, self._total - self.place)
            self._first, self._held = self.place, self._bundle.read(self._entry, self.place, count)
        return self._held[self.place - self._first :]

    def at_end(self) -> bool:
        return self.place == self._total

    def take(self, count: int) -> np.ndarray:
        """The next `count` rows."""
        parts = []
        while count > 0:
            some = self.peek()[:count]
            parts.append(some)
            self.place += len(some)
            count -= len(some)
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else self.peek()[:0]


def _interleaved(
    bundle: Bundle, column: StoredTable, block: int
) -> Iterator[tuple[int, np.ndarray]]:
    """A static table: row i is row i div N of part i mod N."""
    ranks = len(column.parts)
    cursors = [
        Cursor(bundle, bundle.layout.entry(column, part), total, column.block, BUFFER // ranks)
        for part, total in enumerate(column.parts)
    ]
    for first in range(0, column.count, block):
        count = min(block, column.count - first)
        out = np.empty((count, column.dim), tf.as_dtype(column.dtype).as_numpy_dtype)
        for part, cursor in enumerate(cursors):
            mine = out[(part - first) % ranks :: ranks]
            mine[...] = cursor.take(len(mine))
        yield first, out


def merged(bundle: Bundle, columns: list[StoredTable], block: int, made: Any) -> Iterator[Any]:
    """Columns of one dynamic table: yields made(keys, [rows of each]), merged from parts that are
    each ascending.
    """
    ranks, layout = len(columns[0].parts), bundle.layout
    budget = BUFFER // (ranks * (len(columns) + 1))
    parts = [
        [
            Cursor(bundle, entry, total, columns[0].block, budget)
            for entry in (
                layout.keys_entry(columns[0], part),
                *(layout.entry(column, part) for column in columns),
            )
        ]
        for part, total in enumerate(columns[0].parts)
    ]
    pending: list[np.ndarray] = []
    for piece in _ascending(parts):
        pending = piece if not pending else [np.concatenate(both) for both in zip(pending, piece)]
        while len(pending[0]) >= block:
            yield made(pending[0][:block], [p[:block] for p in pending[1:]])
            pending = [p[block:] for p in pending]
    if pending and len(pending[0]):
        yield made(pending[0], pending[1:])


def _ascending(parts: list[list[Cursor]]) -> Iterator[list[np.ndarray]]:
    """[keys, rows of each column], pieces of the merge."""
    while True:
        ahead = [part[0].peek() for part in parts]
        if not any(len(keys) for keys in ahead):
            return
        # Up to here no part that has more to come can have a key that is not in memory.
        bound = min(int(keys[-1]) for keys in ahead if len(keys))
        counts = [int(np.searchsorted(keys, bound, "right")) for keys in ahead]
        taken = [
            [cursor.take(count) for cursor in part] for part, count in zip(parts, counts) if count
        ]
        joined = [np.concatenate(column) for column in zip(*taken)]
        order = np.argsort(joined[0], kind="stable")
        yield [column[order] for column in joined]
