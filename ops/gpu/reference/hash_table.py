"""The hash table in NumPy: sorted keys, and what is known about each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.hash_table import MOST_ROWS, FullError, Inserted, check_steps
from collective.ops.gpu.segments import Segments


class HashTable:
    """See `collective.ops.gpu.hash_table.HashTable`. The number of slots is ignored."""

    def __init__(self, name: str, device: Any = None, slots: int = 0, most_rows: int = MOST_ROWS):
        self.name, self.most_rows = name, most_rows
        self.keys = self.rows = self.steps = np.zeros(0, np.int64)

    def count(self) -> int:
        """Counts the keys."""
        return len(self.keys)

    def found(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds keys: [K] int64, the place of each, and [K] bool, whether it exists."""
        at = np.searchsorted(self.keys, keys)
        there = at < len(self.keys)
        there[there] = self.keys[at[there]] == keys[there]
        return at, there

    def insert(self, keys: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inserts keys; returns `rows`, `new_keys` and `new_rows` of an `Inserted`."""
        distinct, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
        at, there = self.found(distinct)
        rows, steps = np.zeros(len(distinct), np.int64), np.full(len(distinct), step, np.int64)
        rows[there] = self.rows[at[there]]
        steps[there] = np.maximum(self.steps[at[there]], step)
        new = np.flatnonzero(rows == 0)
        new = new[np.argsort(firsts[new])]
        added = np.arange(self.count() + 1, self.count() + len(new) + 1)
        rows[new] = np.where(added <= self.most_rows, added, 0)
        stay, keep = ~np.isin(self.keys, distinct), rows > 0
        merged = [
            np.concatenate([old[stay], now[keep]])
            for old, now in ((self.keys, distinct), (self.rows, rows), (self.steps, steps))
        ]
        order = np.argsort(merged[0])
        self.keys, self.rows, self.steps = (values[order] for values in merged)
        return rows[inverse.reshape(-1)], distinct[new], rows[new]


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
    steps: Sequence[int],
    workspace: Any = None,
) -> Inserted:
    """See `collective.ops.gpu.hash_table.find_or_insert`."""
    check_steps(np.asarray(steps))
    rows, new_keys, new_rows = np.zeros(len(keys), np.int64), [], []
    for t, of_table in enumerate(_by_table(segments, len(tables))):
        rows[of_table], some_keys, some_rows = tables[t].insert(keys[of_table], int(steps[t]))
        new_keys.append(some_keys)
        new_rows.append(some_rows)
    new_counts = np.array([len(some) for some in new_rows], np.int32)
    inserted = Inserted(rows, np.concatenate(new_keys), np.concatenate(new_rows), new_counts)
    full = [table.name for table, some in zip(tables, new_rows) if np.any(some == 0)]
    if full:
        raise FullError(f"{full} are full", inserted)
    return inserted


def remove(
    table: HashTable, gone: np.ndarray, moved: np.ndarray, to: np.ndarray, workspace: Any = None
) -> None:
    """See `collective.ops.gpu.hash_table_maintenance.remove`."""
    table.rows[table.found(moved)[0]] = to
    stay = ~np.isin(table.keys, gone)
    table.keys, table.rows, table.steps = table.keys[stay], table.rows[stay], table.steps[stay]


def steps(table: HashTable) -> np.ndarray:
    """See `collective.ops.gpu.hash_table_maintenance.steps`."""
    return table.steps[np.argsort(table.rows)]


def set_steps(
    table: HashTable, keys: np.ndarray, steps_of_keys: np.ndarray, workspace: Any = None
) -> None:
    """See `collective.ops.gpu.hash_table_maintenance.set_steps`."""
    check_steps(steps_of_keys)
    at, there = table.found(keys)
    table.steps[at[there]] = steps_of_keys[there]


def _by_table(segments: Segments, tables: int) -> list[np.ndarray]:
    section = np.repeat(segments.sections, np.diff(segments.offsets))
    return [np.flatnonzero(section == t) for t in range(tables)]
