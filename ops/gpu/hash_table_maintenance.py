"""Removes, exports and imports keys of a hash table. The host waits for the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.hash_table import (
    FREE_END,
    FREE_FIRST,
    HIGHEST,
    STEPS,
    USED,
    HashTable,
    Inserted,
    find_or_insert,
)
from collective.ops.gpu.partition import prefix_sums
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.workspace import Workspace

_SLOT = np.dtype([("key", np.int64), ("row", np.uint32), ("step", np.uint32)])
_NO_ROW = 2**31


class Exported(NamedTuple):
    """Holds all keys of a table, ascending, as NumPy arrays.

    Attributes:
        keys: [n] int64.
        rows: [n] int64, 0 for a key that waits for one.
        steps: [n] int64, when each was last used or seen.
        counts: [n] int64, how many times a waiting key was seen; 0 for a key with a row.
    """

    keys: np.ndarray
    rows: np.ndarray
    steps: np.ndarray
    counts: np.ndarray


def remove(table: HashTable, keys: Any, workspace: Workspace) -> int:
    """Forgets keys, with their rows and counts. 7 kernels at most; the host waits.

    Bytes moved: 8 a key and one sector at random, and 10 for each 32 rows.

    Args:
        keys: [K] int64; those that aren't there don't matter.
        workspace: of the same device.

    Returns:
        How many rows became free. Their values are not touched, and the next new keys get them.
    """
    size = int(keys.size)
    return _freeing(table, "hash_table_remove", size, (keys, np.int64(size)), workspace)


def remove_unused(table: HashTable, since: int, workspace: Workspace) -> int:
    """Forgets all keys that were last used, or seen, before step `since`, as `remove` does. Reads
    16 bytes a slot.
    """
    return _freeing(
        table,
        "hash_table_remove_unused",
        table.slots + 2,
        (np.uint32(min(max(since, 0), STEPS)), np.int64(table.slots + 2)),
        workspace,
    )


def export(table: HashTable) -> Exported:
    """Returns all keys that are there. The host waits; `find` or `find_or_insert` gives each
    exported key the same row.

    Raises:
        MemoryError: there is no room for 16 bytes a key beside the table.
    """
    out, count = (
        table.empty(2 * (int(table.read()[USED]) + 1), np.int64, "an export"),
        table.device.zeros(1, np.uint32),
    )
    table.launch(
        "hash_table_export",
        table.slots + 2,
        (table.on_device(), np.int64(table.slots + 2), out, count),
    )
    live = table.device.download(out)[: 2 * int(table.device.download(count)[0])].view(_SLOT)
    live = live[np.argsort(live["key"])]
    there = live["row"] < _NO_ROW
    row, step = live["row"].astype(np.int64), live["step"].astype(np.int64)
    return Exported(
        live["key"].copy(),
        np.where(there, row, 0),
        np.where(there, step, row - _NO_ROW),
        np.where(there, 0, step),
    )


def import_(
    table: HashTable, keys: np.ndarray, steps: np.ndarray, counts: np.ndarray, workspace: Workspace
) -> Inserted:
    """Puts exported keys into this table, whose rows may be others. Call it for block after block.

    Args:
        keys: [b] int64, distinct.
        steps: [b], when each was last used or seen.
        counts: [b], how many times it was seen if it waits for a row, 0 if it has one; added to
            what the table counts.
        workspace: where results lie.

    Returns:
        As `find_or_insert`: a key that waits gets a row if it was seen often enough for this table.

    Raises:
        ValueError: a step or a count can't be.
        MemoryError: as `find_or_insert`.
    """
    keys, steps, counts = (
        np.asarray(keys, np.int64),
        np.asarray(steps, np.int64),
        np.asarray(counts, np.int64),
    )
    if not np.all((0 <= steps) & (steps < STEPS) & (0 <= counts) & (counts < STEPS)):
        raise ValueError(
            f"hash table '{table.name}': steps and counts must be from 0 to {STEPS - 1:,}"
        )
    here = table.put(keys)
    seen = table.put(np.where(counts == 0, table.filter_freq, counts).astype(np.int32))
    inserted = find_or_insert([table], here, Segments.of([len(keys)], [0]), 0, workspace, seen)
    table.launch(
        "hash_table_set_steps",
        len(keys),
        (here, np.int64(len(keys)), table.on_device(), table.put(steps.astype(np.uint32))),
    )
    return inserted


def _freeing(
    table: HashTable, kernel: str, threads: int, arguments: tuple[Any, ...], workspace: Workspace
) -> int:
    counters = table.read()
    highest, free = int(counters[HIGHEST]), int(counters[FREE_END] - counters[FREE_FIRST])
    words = highest // 32 + 1
    freed, counts = (
        workspace.take("hash_table.freed", words, np.uint32),
        workspace.take("hash_table.free", words, np.int32),
    )
    freed.fill(0)
    # Before anything is removed: rows must not be lost for want of memory.
    rows = table.empty(max(min(highest, free + threads), 1), np.uint32, "its free rows")
    described = table.on_device()
    table.launch(kernel, threads, (*arguments, described, freed))
    table.launch("hash_table_mark_free", free, (described, freed))
    table.launch("hash_table_count_free", words, (freed, np.int64(words), counts))
    starts = prefix_sums(counts, workspace)
    table.launch(
        "hash_table_list_free", words, (freed, np.int64(words), starts, table.counters, rows)
    )
    table.free_rows = rows
    return int(table.device.download(starts[words:])[0]) - free
