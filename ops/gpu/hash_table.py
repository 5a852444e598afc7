"""Rows of any int64 keys: hash tables in the device's memory, for dynamic tables.

Slots are 16 bytes: the key, its row, and the step at which it was last used. A sector of 32 bytes,
the least that memory moves, has two of them: at a load of 3/4 a key that is there is found after
1.7 sectors on average, one that isn't after 4.6 that lie side by side. Each thread probes by itself
and has four keys in flight. A group of threads for each key would read lines of 128 bytes, most of
it for nothing, and make one probe where a warp makes 32.

`find` is one kernel. `find_or_insert` is five, all tables of a group at once:

    insert  every key finds or takes a slot; of keys without a row, the slot comes to hold the first
    position, and is counted
    count   how many keys of each tile get a row
    scan    the sums of these, by table
    number  first positions get rows, and new keys are listed
    settle  the other positions take the row of their first

Only insert and, for keys without a row, count and number touch the table; the rest is 30 bytes a
key, side by side. So rows follow positions and not the order in which threads ran: the result is
always the same, at no cost worth a choice.

Growth. The host keeps an upper bound of the slots in use, adds every batch's keys to it, and only
where that exceeds the load that is allowed reads how many there are: 48 bytes, log(slots / keys of
a batch) times from one growth to the next, and in every call where one more batch of new keys just
fits. If it doesn't, one kernel puts what lives into slots twice as many, in the stream: the host
waits for nothing more. That reads 16 bytes a slot and writes a sector at random for each key, as an
insertion does; old and new slots are there together meanwhile. Rows never move. (Moving a piece
with every batch would spread this one kernel over many steps, but make every look-up until the end
probe two tables.)

Rows are those of the CPU's key map: 1, 2, 3, … by first appearance; row 0 is of no key, and its
values stay zero. Removal (`hash_table_upkeep.py`, as export and import) leaves keys in their slots,
as removed, until the table is built anew; their rows are given to new keys, lowest first.

`reference/hash_table.py` has the same functions and class with sorted arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.hash_table_state import SOURCE as SOURCE
from collective.ops.gpu.hash_table_state import STEPS, HashTable
from collective.ops.gpu.partition import scan, tiled
from collective.ops.gpu.segments import STATIC, THREADS, TILE, Segments, plan
from collective.ops.gpu.workspace import Workspace

MOST_KEYS = 2**30  # of one call


class Inserted(NamedTuple):
    """What `find_or_insert` found and made.

    Attributes:
        rows: [K] int64, the row of each key; 0 for one that was not seen often enough.
        new_keys: [K] int64, of which the first U are defined, U the sum of `new_counts`: the keys
            that got a row in this call, by table, then first appearance.
        new_rows: [K] int64, their rows.
        new_counts: [T] int32, how many each table has.
    """

    rows: Any
    new_keys: Any
    new_rows: Any
    new_counts: Any


class FullError(MemoryError):
    """Tables have had no rows left for all new keys.

    Attributes:
        inserted: what was found and made nevertheless: `rows` and `new_rows` are 0 where there was
            none left. The values of the new rows must be made as ever.
    """

    def __init__(self, message: str, inserted: Inserted):
        super().__init__(message)
        self.inserted = inserted


def find(tables: Sequence[HashTable], keys: Any, segments: Segments, workspace: Workspace) -> Any:
    """[K] int64: the row of each key, 0 for one that has none. One kernel; the host waits for
    nothing.

    Bytes moved: 8 K read, 8 K written, and of each key one sector of 32 bytes at random, and what
        follows it if need be.

    Args:
        tables: T different ones.
        keys: [K] int64, any values.
        segments: M of them with K keys; their sections are tables.
        workspace: where the result lies until the next call with it.

    Raises:
        ValueError: a table given twice, a segment of no table, too many keys.
    """
    _check(tables)
    made = plan(segments, [STATIC] * len(tables))
    rows = workspace.take("hash_table.found", segments.keys, np.int64)
    described = workspace.upload(
        "hash_table.found_in", np.array([table.described() for table in tables], np.int64)
    )
    on_device = workspace.upload("hash_table.find.segments", made.segments)
    workspace.device.kernel(SOURCE, "hash_table_find")(
        made.tiles, THREADS, (keys, on_device, np.int32(len(made.segments)), described, rows)
    )
    return rows


def find_or_insert(
    tables: Sequence[HashTable],
    keys: Any,
    segments: Segments,
    step: int,
    workspace: Workspace,
    counts: Any = None,
) -> Inserted:
    """Rows of keys, new ones for those that are seen often enough. Launches 5 kernels; the page of
    the module says when the host reads a counter.

    Bytes moved: of each key 8 + 8 for insert, and a sector at random read and written; 8 for count,
        8 for number, 8 for settle.
    Of a key without a row 4 in insert and count, and its sector again; of a new one 16 more, and
    its sector once more.

    Args:
        tables: T different ones.
        keys: [K] int64, any values, in any order; equal ones get the same row.
        segments: M of them with K keys; their sections are tables.
        step: becomes the last-used step of all these keys. It may count coarser than training does:
            a key that was used in the same step before is only read.
        workspace: where results lie until the next call with it.
        counts: [K] int32, how many times each was seen, not negative, those of one key below 2**31
            in sum; None: once each.

    Raises:
        ValueError: a table given twice, a segment of no table, too many keys, or a step that isn't
            from 0 to 2**30 - 1.
        FullError: a table has no rows left for all new keys: those that came first have theirs, the
            others are not there, or are counted and wait.
        MemoryError: slots can't grow; no key was inserted.
        BrokenError: at the latest when the host next reads a counter: there was no free slot for a
            key, though there must be.
    """
    _check(tables)
    if not 0 <= step < STEPS or segments.keys > MOST_KEYS:
        raise ValueError(
            f"{segments.keys:,} keys in step {step:,}: there can be {MOST_KEYS:,} "
            f"keys, and steps from 0 to "
            f"{STEPS - 1:,}"
        )
    device, size = workspace.device, segments.keys
    tiles = tiled(segments, [STATIC] * len(tables), 1, workspace, "hash_table")
    for table, some in zip(
        tables, np.bincount(segments.sections, np.diff(segments.offsets), len(tables))
    ):
        table.make_room(int(some))
    described = workspace.upload(
        "hash_table.tables",
        np.array(
            [table.described(int(first)) for table, first in zip(tables, tiles.plan.section_tiles)],
            np.int64,
        ),
    )
    rows, slots = (
        workspace.take("hash_table.rows", size, np.int64),
        workspace.take("hash_table.slots", size, np.uint32),
    )
    new_keys = workspace.take("hash_table.new_keys", size, np.int64)
    new_rows = workspace.take("hash_table.new_rows", size, np.int64)
    count, by_tile = (
        tiles.plan.tiles,
        (keys, tiles.segments, np.int32(len(tiles.plan.segments)), described),
    )
    sums = (tiles.counts, np.uint32(count))
    device.kernel(SOURCE, "hash_table_insert")(
        count,
        THREADS,
        (*by_tile, np.uint64(0) if counts is None else counts, np.uint32(step), rows, slots),
    )
    device.kernel(SOURCE, "hash_table_count")(
        count, THREADS, (*by_tile, np.uint32(step), rows, slots, *sums), shared=4
    )
    scan(tiles, 1, workspace, "hash_table")
    device.kernel(SOURCE, "hash_table_number")(
        count,
        THREADS,
        (*by_tile, np.uint32(step), rows, slots, *sums, tiles.starts, new_keys, new_rows),
        shared=4 * THREADS // 32,
    )
    device.kernel(SOURCE, "hash_table_settle")(
        -(-size // TILE),
        THREADS,
        (np.int64(size), described, np.int32(len(tables)), tiles.section_counts, rows),
    )
    inserted = Inserted(rows, new_keys, new_rows, tiles.section_counts[0])
    refusals = [refusal for refusal in (table.refusal() for table in tables) if refusal]
    if refusals:
        raise FullError(" ".join(refusals), inserted)
    return inserted


def _check(tables: Sequence[HashTable]) -> None:
    if len({id(table) for table in tables}) != len(tables):
        raise ValueError(
            "a hash table is given twice: let segments of two sections name the same one"
        )
