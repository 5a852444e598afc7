"""Reads tables of a checkpoint with its increments, by ascending keys, without ranks.

    rows of the base ──► replaced by the last increment's row ──► removed keys left out

The keys in a table's increments stay in memory meanwhile, 24 bytes each; rows are read block by
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.chain import Chain, removed_keys
from collective.checkpoint.files.layout import DYNAMIC, StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle
from collective.checkpoint.reading import table_reader

BLOCK = 1 << 14  # rows to read at a time


def is_kept_whole(stored: StoredTable) -> bool:
    """Tells whether every increment has the whole stored table: counts of keys without rows."""
    return (
        stored.kind == DYNAMIC
        and stored.slot_of is not None
        and stored.keys is not None
        and (stored.keys == f"{stored.name}/keys")
    )


def read_static(chain: Chain, stored: StoredTable, block: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (the number of the first row, rows [b, D]) of a static table or slot."""
    updates = [_Update(bundle, update) for bundle, update in chain.updates_of(stored)]
    for first, rows in table_reader.read_static(chain.rows_of(stored), stored, block):
        for update in updates:
            for part in range(len(update.keys)):
                begin, end = np.searchsorted(update.keys[part], (first, first + len(rows)))
                if end > begin:
                    values = update.read([update.stored], part, begin, end)[0]
                    rows[update.keys[part][begin:end] - first] = values
        yield first, rows


def read_whole(chain: Chain, stored: StoredTable) -> np.ndarray:
    """Returns all rows of a static table or slot, [V, D]."""
    whole = np.empty((stored.count, stored.dim), tf.as_dtype(stored.dtype).as_numpy_dtype)
    for first, rows in read_static(chain, stored, BLOCK):
        whole[first : first + len(rows)] = rows
    return whole


def read_dynamic(
    chain: Chain, stored_tables: list[StoredTable], block: int
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields (keys [b], [rows [b, D] of each stored table]) of one dynamic table and its slots."""
    if is_kept_whole(stored_tables[0]) or not chain.increments:
        stored_tables = [chain.last.layout.tables[stored.name] for stored in stored_tables]
        yield from table_reader.read_dynamic_tables(chain.last, stored_tables, block)
        return
    pending: list[np.ndarray] = []
    for keys, rows in _Overlay(chain, stored_tables).merged(block):
        pieces = [keys, *rows]
        pending = pieces if not pending else [np.concatenate(x) for x in zip(pending, pieces)]
        while len(pending[0]) >= block:
            yield pending[0][:block], [of_table[:block] for of_table in pending[1:]]
            pending = [of_table[block:] for of_table in pending]
    if pending and len(pending[0]):
        yield pending[0], pending[1:]


def count_dynamic(chain: Chain, stored: StoredTable) -> int:
    """Returns how many keys a dynamic table has."""
    if is_kept_whole(stored) or not chain.increments:
        return chain.last.layout.tables[stored.name].count
    return sum(len(keys) for keys, _ in _Overlay(chain, [stored]).merged(1 << 20, keys_only=True))


class _Update:
    """Holds what an increment knows about a table: its keys, by parts, and where their rows are."""

    def __init__(self, bundle: Bundle, stored: StoredTable):
        self.bundle, self.stored = bundle, stored
        layout = bundle.layout
        self.keys = [
            bundle.read(layout.keys_entry(stored, part), 0, count)
            for part, count in enumerate(stored.parts)
        ]

    def read(
        self, stored_tables: Sequence[StoredTable], part: int, begin: int, end: int
    ) -> list[np.ndarray]:
        """Reads rows [begin, end) of a part, for each of some tables with the same keys."""
        layout = self.bundle.layout
        return [
            self.bundle.read(layout.entry(stored, part), int(begin), int(end - begin))
            for stored in stored_tables
        ]


class _Overlay:
    """Knows for each key in an increment whether it still exists, and where its newest row is.

    Args:
        chain: the checkpoint.
        stored_tables: a dynamic table of the base, and slots of it.
    """

    def __init__(self, chain: Chain, stored_tables: list[StoredTable]):
        self._chain, self._stored = chain, stored_tables
        self._updates: list[_Update] = []
        self._keys = np.zeros(0, np.int64)  # ascending
        # For each key, the numbers of the update and the part with its row; -1: it was removed.
        self._update, self._part = np.zeros(0, np.int32), np.zeros(0, np.int32)
        for bundle, stored in chain.updates_of(stored_tables[0]):
            self._add(_Update(bundle, stored))

    def merged(
        self, block: int, keys_only: bool = False
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Yields keys and the rows of each stored table, in pieces of any size."""
        base = table_reader.read_dynamic_tables(
            self._chain.base, [] if keys_only else self._stored, block, self._stored[0]
        )
        done = 0
        for keys, rows in base:
            end = int(np.searchsorted(self._keys, keys[-1], "right"))
            stays = self._stays(keys)
            own_keys, own_rows = self._own(done, end, keys_only)
            done = end
            yield _merge(
                [keys[stays], own_keys],
                [[of_table[stays], own] for of_table, own in zip(rows, own_rows)],
            )
        yield self._own(done, len(self._keys), keys_only)

    def _add(self, update: _Update) -> None:
        stored = update.stored
        self._updates.append(update)
        table = update.bundle.layout.tables[stored.slot_of or stored.name]
        covered = self._covered(self._keys, stored)
        self._update[covered] = -1
        for part, keys in enumerate(update.keys):
            self._set(removed_keys(update.bundle, table, part), -1, part)
            self._set(keys, len(self._updates) - 1, part)

    def _set(self, keys: np.ndarray, update: int, part: int) -> None:
        joined = np.concatenate([self._keys, keys])
        updates = np.concatenate([self._update, np.full(len(keys), update, np.int32)])
        parts = np.concatenate([self._part, np.full(len(keys), part, np.int32)])
        order = np.argsort(joined, kind="stable")
        joined, updates, parts = joined[order], updates[order], parts[order]
        is_last = np.append(joined[1:] != joined[:-1], True)[: len(joined)]
        self._keys, self._update, self._part = joined[is_last], updates[is_last], parts[is_last]

    @staticmethod
    def _covered(keys: np.ndarray, stored: StoredTable) -> np.ndarray:
        """Tells for each key whether an increment has all rows of the rank that owned it."""
        if not stored.whole or not any(stored.whole):
            return np.zeros(len(keys), bool)
        return np.asarray(stored.whole)[stored.placement.owner(keys)]

    def _stays(self, keys: np.ndarray) -> np.ndarray:
        """Tells for each key of the base whether no increment has replaced or removed its row."""
        places = np.minimum(np.searchsorted(self._keys, keys), max(0, len(self._keys) - 1))
        stays = np.ones(len(keys), bool)
        if len(self._keys):
            stays &= self._keys[places] != keys
        for update in self._updates:
            stays &= ~self._covered(keys, update.stored)
        return stays

    def _own(self, begin: int, end: int, keys_only: bool) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the increments' rows of some of the keys, without removed keys."""
        stored_tables = [] if keys_only else self._stored
        keys, updates = self._keys[begin:end], self._update[begin:end]
        is_there = updates >= 0
        keys, updates, parts = keys[is_there], updates[is_there], self._part[begin:end][is_there]
        rows = [
            np.empty((len(keys), stored.dim), np.dtype(stored.dtype)) for stored in stored_tables
        ]
        for number, update in enumerate(self._updates if stored_tables else []):
            mine = [update.bundle.layout.tables[stored.name] for stored in stored_tables]
            for part in np.unique(parts[updates == number]):
                at = np.flatnonzero((updates == number) & (parts == part))
                positions = np.searchsorted(update.keys[part], keys[at])
                first = int(positions[0])
                values = update.read(mine, int(part), first, int(positions[-1]) + 1)
                for of_table, read in zip(rows, values):
                    of_table[at] = read[positions - first]
        return keys, rows


def _merge(
    keys: list[np.ndarray], rows: list[list[np.ndarray]]
) -> tuple[np.ndarray, list[np.ndarray]]:
    joined = np.concatenate(keys)
    order = np.argsort(joined, kind="stable")
    return joined[order], [np.concatenate(of_table)[order] for of_table in rows]
