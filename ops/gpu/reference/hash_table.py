"""Has `hash_table` and `hash_table_maintenance` in NumPy: sorted keys, and what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.hash_table import MOST_ROWS, FullError, Inserted
from collective.ops.gpu.hash_table_maintenance import Exported
from collective.ops.gpu.segments import Segments


class HashTable:
    """See `collective.ops.gpu.hash_table.HashTable`. Slots are of no account."""

    def __init__(
        self,
        name: str,
        device: Any = None,
        slots: int = 0,
        most_rows: int = MOST_ROWS,
        filter_freq: int = 1,
    ):
        self.name, self.most_rows, self.filter_freq = name, most_rows, filter_freq
        self.keys = self.rows = self.steps = self.counts = np.zeros(0, np.int64)
        self.free = np.zeros(0, np.int64)  # rows, ascending
        self.top = 0

    def count(self) -> int:
        """Counts the keys that have rows."""
        return int(np.count_nonzero(self.rows))

    def highest(self) -> int:
        """Returns the highest row that a key ever had."""
        return self.top

    def found(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds keys: [K] int64, where each is, and [K] bool, whether it is there."""
        at = np.searchsorted(self.keys, keys)
        there = at < len(self.keys)
        there[there] = self.keys[at[there]] == keys[there]
        return at, there

    def insert(
        self, keys: np.ndarray, counts: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inserts keys; returns `rows`, `new_keys` and `new_rows` of an `Inserted`."""
        distinct, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
        at, there = self.found(distinct)
        rows, seen = np.zeros(len(distinct), np.int64), np.zeros(len(distinct), np.int64)
        rows[there], seen[there] = self.rows[at[there]], self.counts[at[there]]
        if self.filter_freq > 1:
            seen += np.bincount(inverse.reshape(-1), counts, len(distinct)).astype(np.int64)
        new = np.flatnonzero((rows == 0) & ((seen >= self.filter_freq) | (self.filter_freq <= 1)))
        new = new[np.argsort(firsts[new])]
        given = np.concatenate(
            [self.free, np.arange(self.top + 1, min(self.top + len(new), self.most_rows) + 1)]
        )[: len(new)]
        rows[new[: len(given)]] = given
        self.free, self.top = self.free[len(given) :], max([self.top, *given[-1:]])
        seen[rows > 0] = 0
        keep = (rows > 0) | (seen > 0)
        self._replace(
            distinct, distinct[keep], rows[keep], np.full(int(keep.sum()), step), seen[keep]
        )
        return rows[inverse.reshape(-1)], distinct[new], rows[new]

    def _replace(self, without: np.ndarray, keys: np.ndarray, *values: np.ndarray) -> None:
        stay = ~np.isin(self.keys, without)
        order = np.argsort(np.concatenate([self.keys[stay], keys]))
        self.rows, self.steps, self.counts = (
            np.concatenate([old[stay], new])[order]
            for old, new in zip((self.rows, self.steps, self.counts), values)
        )
        self.keys = np.concatenate([self.keys[stay], keys])[order]

    def drop(self, gone: np.ndarray) -> int:
        """Removes the keys at these [n] places; returns how many rows are free."""
        freed = self.rows[gone][self.rows[gone] > 0]
        self.free = np.sort(np.concatenate([self.free, freed]))
        self.keys, self.rows, self.steps, self.counts = (
            np.delete(values, gone) for values in (self.keys, self.rows, self.steps, self.counts)
        )
        return len(freed)


def find(
    tables: Sequence[HashTable], keys: np.ndarray, segments: Segments, workspace: Any = None
) -> np.ndarray:
    """See `collective.ops.gpu.hash_table.find`."""
    rows = np.zeros(len(keys), np.int64)
    for t, of_table in enumerate(_by_table(segments, len(tables))):
        at, there = tables[t].found(keys[of_table])
        rows[of_table[there]] = tables[t].rows[at[there]]
    return rows


def find_or_insert(
    tables: Sequence[HashTable],
    keys: np.ndarray,
    segments: Segments,
    step: int,
    workspace: Any = None,
    counts: np.ndarray | None = None,
) -> Inserted:
    """See `collective.ops.gpu.hash_table.find_or_insert`."""
    counts = np.ones(len(keys), np.int32) if counts is None else counts
    rows, new_keys, new_rows = np.zeros(len(keys), np.int64), [], []
    for t, of_table in enumerate(_by_table(segments, len(tables))):
        rows[of_table], some_keys, some_rows = tables[t].insert(
            keys[of_table], counts[of_table], step
        )
        new_keys.append(some_keys)
        new_rows.append(some_rows)
    new_counts = np.array([len(some) for some in new_rows], np.int32)
    inserted = Inserted(rows, np.concatenate(new_keys), np.concatenate(new_rows), new_counts)
    full = [table.name for table, some in zip(tables, new_rows) if np.any(some == 0)]
    if full:
        raise FullError(f"{full} are full", inserted)
    return inserted


def remove(table: HashTable, keys: np.ndarray, workspace: Any = None) -> int:
    """See `collective.ops.gpu.hash_table_maintenance.remove`."""
    return table.drop(np.flatnonzero(np.isin(table.keys, keys)))


def remove_unused(table: HashTable, since: int, workspace: Any = None) -> int:
    """See `collective.ops.gpu.hash_table_maintenance.remove_unused`."""
    return table.drop(np.flatnonzero(table.steps < since))


def export(table: HashTable) -> Exported:
    """See `collective.ops.gpu.hash_table_maintenance.export`."""
    return Exported(table.keys, table.rows, table.steps, table.counts)


def import_(
    table: HashTable, keys: np.ndarray, steps: np.ndarray, counts: np.ndarray, workspace: Any = None
) -> Inserted:
    """See `collective.ops.gpu.hash_table_maintenance.import_`."""
    seen = np.where(counts == 0, table.filter_freq, counts)
    inserted = find_or_insert([table], keys, Segments.of([len(keys)], [0]), 0, None, seen)
    at, there = table.found(keys)
    table.steps[at[there]] = steps[there]
    return inserted


def _by_table(segments: Segments, tables: int) -> list[np.ndarray]:
    section = np.repeat(segments.sections, np.diff(segments.offsets))
    return [np.flatnonzero(section == t) for t in range(tables)]
