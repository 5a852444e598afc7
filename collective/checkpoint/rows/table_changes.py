"""Follows the changes of tables and slots in a session, for one consumer.

    writes are announced ──► a ChangeSet for each table (`collective.ops.rows.row_changes`)
    begin ──► what has changed since, by keys ──► done: the consumer has it; or undo

What can't be followed counts as changed completely: everything before the first `begin`,
dynamic tables on a GPU, and tables written by an operation that a session had seen before writes
were to be announced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from collective.checkpoint.rows.shards import Shard, by_table
from collective.ops.communication import collectives
from collective.ops.rows.row_changes import ChangeSet
from collective.tables.updates import write_announcements


@dataclasses.dataclass(frozen=True)
class TableChanges:
    """Describes the changes of this rank's part of a table, or of a slot of a static one.

    Attributes:
        session: the session with the rows.
        group: a dynamic table with its slots; else a table or a slot alone.
        whole: whether all of this rank's rows count as changed; then keys that no longer exist may
            have existed.
        keys: [K] int64 the changed rows' numbers in the table, or the changed keys, ascending;
            None: all.
        removed: [R] int64 removed keys, ascending.
    """

    session: Any
    group: Sequence[Shard]
    whole: bool
    keys: np.ndarray | None
    removed: np.ndarray

    @property
    def count(self) -> int:
        """Returns how many rows have changed."""
        if self.keys is not None:
            return len(self.keys)
        table: Any = self.group[0].table
        is_dynamic = self.group[0].dynamic
        return table.local_count(self.session) if is_dynamic else self.group[0].shape[0]

    def blocks(self, block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (keys, local rows) by ascending keys, [b] int64 each, b <= `block`.

        Rows of a dynamic table are at the places that
        `collective.tables.rows.row_store.Store.locate` returns.
        """
        table: Any = self.group[0].table
        if self.keys is None and self.group[0].dynamic:
            yield from table.ascending(self.session, block)
            return
        rank, count = collectives.rank(), self.count
        store = table.store(self.session) if self.group[0].dynamic else None
        for first in range(0, count, block):
            last = min(first + block, count)
            if self.keys is None:
                rows = np.arange(first, last, dtype=np.int64)
                yield table.row_placement.key(rank, rows), rows
                continue
            keys = self.keys[first:last]
            rows = table.row_placement.row(keys) if store is None else store.locate(keys)
            yield keys, rows

    def read(self, keys: np.ndarray, rows: np.ndarray) -> list[np.ndarray] | None:
        """Reads a block of a table that may have rows in a file: [b, D] for each of its group.

        It returns None for tables in memory, whose rows are read in the usual way.
        """
        table: Any = self.group[0].table
        if not self.group[0].dynamic or table.policy.storage is None:
            return None
        store = table.store(self.session)
        columns = [
            store.values if shard.slot_of is None else shard.variable.column(self.session)
            for shard in self.group
        ]
        values: list[np.ndarray] = store.read(columns, keys, rows)
        return values


class Follower:
    """Follows tables and slots in one session.

    Args:
        session: the session.
        shards: the tables and slots.
    """

    def __init__(self, session: Any, shards: Sequence[Shard]):
        self._session, self._groups = session, by_table(shards)
        self._sets: dict[str, ChangeSet] = {}
        self._unfollowed: set[str] = set()

    def follows(self, shards: Sequence[Shard]) -> bool:
        """Tells whether these are the tables and slots that it follows."""
        mine = {shard.name for group in self._groups for shard in group}
        return mine == {shard.name for shard in shards}

    def begin(self) -> None:
        """Sets aside what has changed so far, between runs; call `done` or `undo` afterwards."""
        for group in self._groups:
            name, table = group[0].name, group[0].table
            variables = [group[0].variable]
            if group[0].dynamic:
                variables += getattr(table, "slots", [])
            numbers = write_announcements.watch(self._session, variables)
            if name not in self._sets:
                rows = getattr(table, "capacity", 0) + 1 if group[0].dynamic else group[0].shape[0]
                self._sets[name] = ChangeSet(rows)
            was_followed = self._sets[name].listen(numbers)
            self._sets[name].begin()
            is_known = was_followed and all(map(write_announcements.is_announced, variables))
            if not is_known or getattr(table, "bridge", None) is not None:
                self._unfollowed.add(name)

    def changes(self) -> dict[str, TableChanges]:
        """Returns what was set aside, by the names of tables and of static tables' slots."""
        return {group[0].name: self._changes_of(group) for group in self._groups}

    def done(self) -> None:
        """Notes that the consumer has what was set aside."""
        self._unfollowed.clear()
        for changes in self._sets.values():
            changes.done()

    def undo(self) -> None:
        """Counts what was set aside as still changed."""
        for changes in self._sets.values():
            changes.undo()

    def _changes_of(self, group: Sequence[Shard]) -> TableChanges:
        name, session = group[0].name, self._session
        changes, nothing = self._sets[name].changes(), np.zeros(0, np.int64)
        table: Any = group[0].table
        if group[0].dynamic:
            slots = [shard.variable for shard in group if shard.slot_of is not None]
            table.initialize_slot_rows(session, slots)
        if changes.all or name in self._unfollowed:
            return TableChanges(session, group, True, None, nothing)
        if not group[0].dynamic:
            keys = table.row_placement.key(collectives.rank(), changes.rows)
            return TableChanges(session, group, False, keys, nothing)
        store = table.store(session)
        last = store.count_in_memory
        rows = changes.rows[(changes.rows >= 1) & (changes.rows <= last)]
        keys = store.keys.keys(1, last + 1)[rows - 1] if last else nothing
        moved = changes.in_file[store.locate(changes.in_file) != 0]
        keys = np.unique(np.concatenate([keys, moved]))
        removed = changes.removed[store.locate(changes.removed) == 0]
        return TableChanges(session, group, False, keys, removed)
