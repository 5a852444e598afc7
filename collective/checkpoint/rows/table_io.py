"""Writes this rank's rows of tables from a session to a checkpoint, and restores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from collective.checkpoint.files.chain import Chain
from collective.checkpoint.files.layout import CheckpointLayout, StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle, BundleWriter
from collective.checkpoint.rows import increment_io, key_counts
from collective.checkpoint.rows.held_rows import HeldReads, HeldRows, Receiver, can_be_held
from collective.checkpoint.rows.shards import (
    RowReads,
    RowRequest,
    RowWrites,
    Shard,
    block_of,
    by_table,
    operations_of,
)
from collective.ops import placement
from collective.ops.communication import collectives
from collective.ops.graph.sessions import errors_without_stacks, run_unpatched
from collective.ops.rows import data_files

# Shards up to this many bytes may exist twice, old and new, while they are restored.
SPARE_BYTES = 100 << 20

# Blocks of (keys, or None for a static table; local rows).
Blocks = Iterator[tuple[Any, np.ndarray]]
ReaderByKey = Callable[[np.ndarray, np.ndarray], list[np.ndarray]]

# ---- Saving


class SessionRows:
    """Provides rows of tables and slots of a session, which must not change meanwhile."""

    def __init__(self, session: Any, shards: Sequence[Shard]):
        self._session = session
        groups = by_table(shards)
        for group in groups:
            if group[0].dynamic:
                slots = [s.variable for s in group if s.slot_of is not None]
                group[0].table.initialize_slot_rows(session, slots)
        self._held = HeldRows(session, [s for group in groups if can_be_held(group) for s in group])
        operations_of([s for group in groups if not can_be_held(group) for s in group])

    def blocks(self, group: Sequence[Shard], block: int) -> tuple[int, Blocks]:
        """Returns how many rows the shards of a group have here, and the rows in blocks."""
        if not group[0].dynamic:
            return group[0].shape[0], static_blocks(group[0].shape[0], block)
        table: Any = group[0].table
        return table.local_count(self._session), table.ascending(self._session, block)

    def reads(self, receive: Receiver) -> HeldReads:
        """Returns a reader of rows in memory; `receive` gets them."""
        return self._held.reads(receive, RowReads(self._session, receive))

    def end(self) -> None:
        """Releases the memory of all shards."""
        self._held.end()

    def reader_by_key(self, group: Sequence[Shard]) -> ReaderByKey | None:
        """Returns a reader for rows of keys that may be in a file; None if all are in memory.

        It takes keys [b] and local rows [b], and returns [b, D] for each shard.
        """
        table: Any = group[0].table
        if not group[0].dynamic or table.policy.storage is None:
            return None
        store = table.store(self._session)
        columns = [
            store.values if shard.slot_of is None else shard.variable.column(self._session)
            for shard in group
        ]
        return lambda keys, rows: store.read(columns, keys, rows)

    def key_counts(self, shard: Shard) -> key_counts.KeyCounts | None:
        """Returns the counts of a table's keys; None if the table counts none."""
        return key_counts.in_session(self._session, shard)


def write(
    session: Any, shards: Sequence[Shard], writer: BundleWriter, source: Any = None
) -> dict[str, int]:
    """Writes this rank's rows of all shards; returns how many rows each has here.

    Args:
        session: the session with the shards.
        shards: the shards, a dynamic table with its slots.
        writer: takes the rows.
        source: provides the rows, like `SessionRows`; by default made from the session. With
            another source the session isn't used.
    """
    if source is None:
        source = SessionRows(session, shards)
        try:
            return write(session, shards, writer, source)
        finally:
            source.end()
    ranks = collectives.size()
    layout = CheckpointLayout(ranks)
    stored_tables: dict[str, StoredTable] = {}

    def write_rows(shard: Shard, first: int, values: Any) -> None:
        stored, part = stored_tables[shard.name], shard.part
        assert part is not None
        writer.add(layout.entry(stored, part), (stored.parts[part], stored.dim), first, values)

    reads, rows_of = source.reads(write_rows), {}
    for group in by_table(shards):
        block = block_of(group)
        count, blocks = source.blocks(group, block)
        for shard in group:
            stored_tables[shard.name] = shard.stored([count] * ranks, block)
            rows_of[shard.name] = count
        part = group[0].part
        if part is None:
            continue
        read_by_key = source.reader_by_key(group)
        first = 0
        for keys, rows in blocks if count else [(np.zeros(0, np.int64), np.zeros(0, np.int64))]:
            if group[0].dynamic:
                keys_entry = layout.keys_entry(stored_tables[group[0].name], part)
                writer.add(keys_entry, (count,), first, keys)
            if read_by_key is not None:
                for shard, values in zip(group, read_by_key(keys, rows)):
                    write_rows(shard, first, values)
            else:
                for shard in group:
                    reads.add(RowRequest(shard, first, rows))
            first += len(rows)
    reads.flush()
    for shard in shards:
        if shard.slot_of is None:
            counts = source.key_counts(shard)
            if counts is not None:
                rows_of[key_counts.entry_of(shard.name)] = counts.write(layout, writer)
    return rows_of


def static_blocks(count: int, block: int) -> Blocks:
    """Yields blocks of (None, local rows)."""
    for first in range(0, count, block):
        yield None, np.arange(first, min(first + block, count))


def bytes_in(session: Any, shards: Sequence[Shard]) -> int:
    """Returns how many bytes this rank's rows of all shards take in a checkpoint."""
    total = 0
    for group in by_table(shards):
        table: Any = group[0].table
        count = table.local_count(session) if group[0].dynamic else group[0].shape[0]
        row_bytes = 8 if group[0].dynamic else 0  # for the key
        row_bytes += sum(shard.dim * np.dtype(shard.dtype).itemsize for shard in group)
        total += count * row_bytes
    return total


def layout_of(
    shards: Sequence[Shard], counts_by_rank: Sequence[dict[str, int]]
) -> CheckpointLayout:
    """Returns the layout of a checkpoint.

    Args:
        shards: the shards of all tables.
        counts_by_rank: how many rows each rank has written, by the shards' names.
    """
    tables = {}
    for group in by_table(shards):
        for shard in group:
            parts = [counts[shard.name] for counts in counts_by_rank]
            tables[shard.name] = shard.stored(parts, block_of(group))
            name = key_counts.entry_of(shard.name)
            if name in counts_by_rank[0]:
                counts = key_counts.stored(shard, [counts[name] for counts in counts_by_rank])
                assert counts is not None
                tables[counts.name] = counts
    return CheckpointLayout(len(counts_by_rank), tables)


# ---- Reading this rank's rows of a checkpoint that any number of ranks saved


def own_rows(
    stored: StoredTable, now: placement.RowPlacement
) -> Iterator[tuple[int, placement.CommonRows]]:
    """Yields the parts of a static table that hold rows of this rank, and which of their rows.

    Args:
        stored: the table.
        now: the placement of its rows on the ranks.
    """
    for part, count in enumerate(stored.parts):
        common = stored.row_placement.common(part, now, collectives.rank())
        if common is not None and common.first < count:
            yield part, common


def read_static(
    bundle: Bundle,
    stored: StoredTable,
    now: placement.RowPlacement,
    receive: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """Reads all rows that this rank owns, a block at a time.

    Args:
        bundle: the checkpoint.
        stored: a static table in it, or a slot.
        now: the placement of its rows on the ranks.
        receive: called with local rows [b] and their values [b, D].
    """
    saved = stored.row_placement
    for part, common in own_rows(stored, now):
        entry, step = bundle.layout.entry(stored, part), common.step
        for first in range(0, stored.parts[part], stored.block):
            count = min(stored.block, stored.parts[part] - first)
            first_of_rank = (common.first - first) % step
            values = bundle.read(entry, first, count)[first_of_rank::step]
            rows_in_part = first + first_of_rank + np.arange(len(values)) * step
            receive(now.row(saved.key(part, rows_in_part)), values)


def read_shard(
    bundle: Bundle, stored: StoredTable, now: placement.RowPlacement, out: np.ndarray
) -> np.ndarray:
    """Fills `out` with this rank's rows of a static table or slot, and returns it."""

    def receive(local_rows: np.ndarray, values: np.ndarray) -> None:
        if len(local_rows):
            step = int(local_rows[1] - local_rows[0]) if len(local_rows) > 1 else 1
            out[int(local_rows[0]) : int(local_rows[-1]) + 1 : step] = values

    read_static(bundle, stored, now, receive)
    return out


def read_dynamic(
    bundle: Bundle,
    stored_tables: Sequence[StoredTable],
    now: placement.Placement,
    receive: Callable[[np.ndarray, list[np.ndarray]], None],
) -> None:
    """Reads all keys that this rank owns, and their rows, a block at a time.

    Args:
        bundle: the checkpoint.
        stored_tables: a dynamic table in it, or slots of one.
        now: the placement of its keys on the ranks.
        receive: called with keys [b] and the values [b, D] of each stored table.
    """
    layout, first_table = bundle.layout, stored_tables[0]
    rank = collectives.rank()
    for part in first_table.placement.parts_of(now, rank):
        for first in range(0, first_table.parts[part], first_table.block):
            count = min(first_table.block, first_table.parts[part] - first)
            keys = bundle.read(layout.keys_entry(first_table, part), first, count)
            is_owned = now.owner(keys) == rank
            values = [
                bundle.read(layout.entry(stored, part), first, count)[is_owned]
                for stored in stored_tables
            ]
            receive(keys[is_owned], values)


def slices_of_rank(
    bundle: Bundle, stored: StoredTable, now: placement.RowPlacement
) -> tuple[list[str], np.ndarray] | None:
    """Finds the slices of files that hold rows of a static table, or a slot, that this rank owns.

    Returns:
        (paths, [S, 8] int64), as `data_files.RestoreOperation.feeds` takes them; None if the rows
        can't be read that way.
    """
    if not data_files.are_possible(bundle.prefix):
        return None
    saved, numbers = stored.row_placement, []
    for part, common in own_rows(stored, now):
        slices = bundle.row_slices(bundle.layout.entry(stored, part))
        if sum(piece.count for piece in slices) != stored.parts[part]:
            return None
        for piece in slices:
            skip = (common.first - piece.first) % common.step
            first = now.row(saved.key(part, piece.first + skip))
            place = piece.shard, piece.offset, piece.size, piece.checksum
            numbers.append((*place, skip, common.step, first, common.other_step))
    slices_of_files = np.array(numbers, np.int64).reshape(-1, data_files.SLICE_NUMBERS)
    return bundle.data_paths(), slices_of_files


# ---- Restoring


class TableRestore:
    """Restores this rank's rows of all tables, in steps that all ranks take together.

    Static shards without values are filled as they are read. Shards with values keep them until all
    ranks have read everything: new values wait in memory or, if there are too many, are read a
    second time.

    Args:
        session: the session.
        chain: the checkpoint, with its increments.
        pairs: each shard, and the stored table of the base from which it is restored.

    Attributes:
        reads_twice: whether values are read twice instead of waiting in memory; set it before
            `read`.
    """

    def __init__(self, session: Any, chain: Chain, pairs: Sequence[tuple[Shard, StoredTable]]):
        self._session, self._chain = session, chain
        self._stored = {shard.name: stored for shard, stored in pairs}
        self._groups = by_table([shard for shard, _ in pairs])
        self._static = [shard for shard, _ in pairs if not shard.dynamic]
        self._initialized: set[str] = set()
        self._waiting_values: list[tuple[Shard, np.ndarray]] = []
        self._waiting_loads: list[Any] = []
        self.reads_twice = False

    def must_read_twice(self) -> bool:
        """Tells whether old and new values together exceed this rank's memory."""
        shards = [shard for group in self._groups for shard in group]
        flags = run_unpatched(self._session, [op.initialized for op in operations_of(shards)])
        self._initialized = {shard.name for shard, flag in zip(shards, flags) if flag}
        size = 0
        for shard in shards:
            if shard.name in self._initialized:
                rows = self._stored[shard.name].count
                size += rows * shard.dim * np.dtype(shard.dtype).itemsize
        return size > SPARE_BYTES * collectives.size()

    def verify(self) -> None:
        """Reads everything once, and keeps nothing."""
        for group in self._groups:
            stored_tables = [self._stored[shard.name] for shard in group]
            if group[0].dynamic:
                now = group[0].table.placement
                read_dynamic(self._chain.base, stored_tables, now, lambda *_: None)
                increment_io.read_dynamic(
                    self._chain, stored_tables, now, lambda *_: None, lambda *_: None
                )
            elif not self._restore_directly(group[0], verifies=True):
                self._read_static(group[0], lambda *_: None)

    def read(self) -> None:
        """Reads everything that can be read before every rank has read without an error."""
        self._fill(self._static_shards(initialized=False))
        if not self.reads_twice:
            self._waiting_values = [
                (shard, self._read_values(shard)) for shard in self._static_shards(initialized=True)
            ]
        for group in self._groups:
            if group[0].dynamic:
                self._read_dynamic(group)

    def undo(self) -> None:
        """Reverts what `read` has done to the session."""
        uninitialized = self._static_shards(initialized=False)
        run_unpatched(self._session, [op.destroy for op in operations_of(uninitialized)])

    def assign(self) -> None:
        """Puts everything that was read into effect."""
        writes = RowWrites(self._session)
        while self._waiting_values:
            shard, values = self._waiting_values.pop()
            block = block_of([shard])
            for first in range(0, len(values), block):
                rows = np.arange(first, min(first + block, len(values)))
                writes.add(RowRequest(shard, first, rows, values[first : first + block]))
        writes.flush()
        if self.reads_twice:
            self._fill(self._static_shards(initialized=True))
        while self._waiting_loads:
            self._waiting_loads.pop().assign(self._session)

    def _static_shards(self, initialized: bool) -> list[Shard]:
        return [s for s in self._static if (s.name in self._initialized) == initialized]

    def _read_values(self, shard: Shard) -> np.ndarray:
        stored, out = self._stored[shard.name], np.empty(shard.shape, shard.dtype)
        now = shard.table.row_placement
        read_shard(self._chain.rows_of(stored), stored, now, out)

        def receive(rows: np.ndarray, values: np.ndarray) -> None:
            out[rows] = values

        increment_io.read_static(self._chain, stored, now, receive)
        return out

    def _read_static(self, shard: Shard, receive: Callable[[np.ndarray, np.ndarray], None]) -> None:
        stored, now = self._stored[shard.name], shard.table.row_placement
        read_static(self._chain.rows_of(stored), stored, now, receive)
        increment_io.read_static(self._chain, stored, now, receive)

    def _fill(self, shards: Sequence[Shard]) -> None:
        """Reads static shards directly into their variables."""
        writes = RowWrites(self._session)
        for shard in shards:

            def receive(rows: np.ndarray, values: np.ndarray, shard: Shard = shard) -> None:
                writes.add(RowRequest(shard, 0, rows, values))

            if self._restore_directly(shard):
                now = shard.table.row_placement
                increment_io.read_static(self._chain, self._stored[shard.name], now, receive)
            else:
                self._allocate([shard])
                self._read_static(shard, receive)
            writes.flush()

    def _allocate(self, shards: Sequence[Shard]) -> None:
        """Gives memory to shards without values."""
        fresh = [shard for shard in shards if shard.name not in self._initialized]
        run_unpatched(self._session, [op.allocate for op in operations_of(fresh)])

    def _restore_directly(self, shard: Shard, verifies: bool = False) -> bool:
        """Reads a static shard's rows of the base from its files directly into the variable.

        Args:
            shard: the shard.
            verifies: whether to only read and check the rows, and leave the variable unchanged.

        Returns:
            Whether that is possible, and was done; else nothing was done.
        """
        restore, stored = operations_of([shard])[0].restore, self._stored[shard.name]
        bundle, now = self._chain.rows_of(stored), shard.table.row_placement
        found = slices_of_rank(bundle, stored, now)
        if restore is None or found is None:
            return False
        feeds = restore.feeds(*found, shard.shape, verifies)
        with bundle.naming(stored.name), errors_without_stacks():
            run_unpatched(self._session, restore.operation, feeds)
        if verifies:
            increment_io.read_static(self._chain, stored, now, lambda *_: None)
        return True

    def _read_dynamic(self, group: Sequence[Shard]) -> None:
        table: Any = group[0].table
        slots = [shard.variable for shard in group if shard.slot_of is not None]
        if self.reads_twice:
            # Empty variables take their place: other objects still use the old memory.
            run_unpatched(
                self._session, [v.initializer for v in (table, *getattr(table, "slots", []))]
            )
        loading = table.loading(slots)

        def receive(keys: np.ndarray, values: list[np.ndarray]) -> None:
            loading.add(keys, values[0], dict(zip([slot.op.name for slot in slots], values[1:])))

        stored_tables = [self._stored[shard.name] for shard in group]
        now = table.placement
        read_dynamic(self._chain.base, stored_tables, now, receive)
        increment_io.read_dynamic(self._chain, stored_tables, now, receive, loading.remove)
        saved_as = self._stored[group[0].name].name
        key_counts.read(self._chain.last, group[0], saved_as, loading.store)
        self._waiting_loads.append(loading)
