"""Collects rows and slots of a dynamic table as they are read, until they replace a session's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collective.ops.graph.sessions import run_unpatched
from collective.tables.rows import row_store


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
