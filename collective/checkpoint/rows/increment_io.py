"""Writes this rank's changed rows to an increment, and reads those of any number of ranks.

<table>/keys/part_<r>             the changed rows of a static table, or keys of a dynamic one
<table>/part_<r>                  their values; the same for slots
<table>/keys/removed/part_<r>     the removed keys of a dynamic table
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from collective.checkpoint.files.chain import Chain, removed_keys
from collective.checkpoint.files.layout import (
    CheckpointLayout,
    Increment,
    StoredTable,
)
from collective.checkpoint.files.tensor_bundle import Bundle, BundleWriter
from collective.checkpoint.rows import key_counts
from collective.checkpoint.rows.shards import RowReads, RowRequest, Shard, block_of, by_table
from collective.checkpoint.rows.table_changes import TableChanges
from collective.ops import placement
from collective.ops.communication import collectives

# What each rank tells the others about each table, by the shards' names: the numbers of rows and of
# removed keys, and whether these are all rows.
Counts = dict[str, Any]

# ---- Saving


def write(
    session: Any,
    shards: Sequence[Shard],
    changes: Mapping[str, TableChanges],
    writer: BundleWriter,
) -> Counts:
    """Writes this rank's changed rows; returns their number for each shard.

    Args:
        session: the session.
        shards: the tables and slots.
        changes: what changed, by the names of tables and of static tables' slots.
        writer: writes the increment.
    """
    ranks = collectives.size()
    layout, counts = CheckpointLayout(ranks), Counts()
    stored_tables: dict[str, StoredTable] = {}

    def write_rows(shard: Shard, first: int, values: np.ndarray) -> None:
        stored, part = stored_tables[shard.name], shard.part
        assert part is not None
        entry = layout.entry(stored, part)
        writer.add(entry, (stored.parts[part], stored.dim), first, values)

    reads = RowReads(session, write_rows)
    for group in by_table(shards):
        of_table = changes[group[0].name]
        count, gone, block = of_table.count, len(of_table.removed), block_of(group)
        for shard in group:
            stored_tables[shard.name] = stored_table(shard, block, [[count, gone, False]] * ranks)
            counts[shard.name] = [count, gone, of_table.whole]
        stored, first, part = stored_tables[group[0].name], 0, group[0].part
        if part is None:
            continue
        for keys, rows in of_table.blocks(block) if count else [(of_table.removed[:0],) * 2]:
            writer.add(layout.keys_entry(stored, part), (count,), first, keys)
            read = of_table.read(keys, rows) if len(rows) else None
            if read is not None:
                for shard, values in zip(group, read):
                    write_rows(shard, first, values)
            else:
                for shard in group:
                    reads.add(RowRequest(shard, first, rows))
            first += len(rows)
        if stored.removed is not None:
            writer.add(layout.removed_entry(stored, part), (gone,), 0, of_table.removed)
    reads.flush()
    for shard in shards:
        if shard.slot_of is None:
            counted = key_counts.in_session(session, shard)
            if counted is not None:
                counts[key_counts.entry_of(shard.name)] = counted.write(layout, writer)
    return counts


def stored_table(shard: Shard, block: int, counts_by_rank: Sequence[Sequence[Any]]) -> StoredTable:
    """Describes a table or slot in an increment.

    Args:
        shard: the table or slot.
        block: rows in a slice.
        counts_by_rank: for each rank its rows, its removed keys, and whether the rows are all.
    """
    stored = shard.stored([rows for rows, _, _ in counts_by_rank], block)
    is_dynamic_table = shard.dynamic and shard.slot_of is None
    of_parts = shard.of_parts(counts_by_rank)
    return dataclasses.replace(
        stored,
        keys=stored.keys or f"{shard.name}/keys",
        whole=tuple(whole for _, _, whole in of_parts),
        removed=tuple(gone for _, gone, _ in of_parts) if is_dynamic_table else None,
    )


def layout_of(
    shards: Sequence[Shard], counts_by_rank: Sequence[Counts], increment: Increment
) -> CheckpointLayout:
    """Returns the layout of an increment.

    Args:
        shards: the shards of all tables.
        counts_by_rank: the result of `write` on each rank.
        increment: its place in its chain.
    """
    tables = {}
    for group in by_table(shards):
        for shard in group:
            of_ranks = [counts[shard.name] for counts in counts_by_rank]
            tables[shard.name] = stored_table(shard, block_of(group), of_ranks)
            name = key_counts.entry_of(shard.name)
            if name in counts_by_rank[0]:
                counted = key_counts.stored(shard, [counts[name] for counts in counts_by_rank])
                assert counted is not None
                tables[counted.name] = counted
    return CheckpointLayout(len(counts_by_rank), tables, increment=increment)


# ---- Restoring


def read_static(
    chain: Chain,
    stored: StoredTable,
    now: placement.RowPlacement,
    receive: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """Reads this rank's rows of a static table from the increments of a chain, in order.

    Args:
        chain: the checkpoint.
        stored: the table in its base, or a slot.
        now: the placement of its rows on the ranks.
        receive: called with local rows [b] and their values [b, D].
    """
    rank = collectives.rank()
    for bundle, update in chain.updates_of(stored):
        with chain.advising(bundle):
            for keys, (values,) in _blocks(bundle, [update], now):
                is_own = now.owner(keys) == rank
                if is_own.any():
                    receive(now.row(keys[is_own]), values[is_own])


def read_dynamic(
    chain: Chain,
    stored_tables: Sequence[StoredTable],
    now: placement.Placement,
    receive: Callable[[np.ndarray, list[np.ndarray]], None],
    remove: Callable[[Callable[[np.ndarray], np.ndarray]], None],
) -> None:
    """Reads this rank's keys of a dynamic table from the increments of a chain, in order.

    Args:
        chain: the checkpoint.
        stored_tables: the table in its base, and slots of it.
        now: the placement of its keys on the ranks.
        receive: called with keys [b] and the values [b, D] of each stored table.
        remove: called with a function that says which of the table's keys were removed.
    """
    rank = collectives.rank()
    for bundle, table in chain.updates_of(stored_tables[0]):
        updates = [bundle.layout.tables[stored.name] for stored in stored_tables]
        with chain.advising(bundle):
            gone = [
                removed_keys(bundle, table, part) for part in table.placement.parts_of(now, rank)
            ]
            remove(lambda keys: _gone(keys, table, gone))  # noqa: B023, called at once
            for keys, values in _blocks(bundle, updates, now):
                is_own = now.owner(keys) == rank
                receive(keys[is_own], [of_table[is_own] for of_table in values])


def _gone(keys: np.ndarray, table: StoredTable, gone: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the removed keys: those that are listed, and all keys of parts that are whole."""
    of_whole_parts = keys[:0]
    if table.whole and any(table.whole):
        is_whole = np.asarray(table.whole)[table.placement.owner(keys)]
        of_whole_parts = keys[is_whole]
    return np.concatenate([of_whole_parts, *gone])


def _blocks(
    bundle: Bundle, stored_tables: Sequence[StoredTable], now: placement.Placement
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields keys and the rows of stored tables with the same keys, a block at a time.

    They are those of the parts that can have keys of this rank, as `now` places them.
    """
    layout, table = bundle.layout, stored_tables[0]
    for part in table.placement.parts_of(now, collectives.rank()):
        for first in range(0, table.parts[part], table.block):
            count = min(table.block, table.parts[part] - first)
            keys = bundle.read(layout.keys_entry(table, part), first, count)
            yield (
                keys,
                [bundle.read(layout.entry(stored, part), first, count) for stored in stored_tables],
            )
