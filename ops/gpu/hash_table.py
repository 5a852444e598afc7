"""Maps any int64 keys to rows of dynamic tables: hash tables in the device's memory.

A slot has 16 bytes: the key, its row, and the step to which its last use led. A sector of 32 bytes,
the least that memory moves, has two slots. At a load of 3/4, an existing key is found after 1.7
sectors on average, a missing one after 4.6 adjacent sectors. Each thread probes by itself and has
four keys in flight. (A group of threads per key would read lines of 128 bytes, mostly for nothing,
and make one probe where a warp makes 32.)

`find` is one kernel. `find_or_insert` is five, for all tables of a group at once:

    insert  every key finds or takes a slot; for keys without a row, the slot then holds the first
    position
    count   how many keys of each tile get a row
    scan    the sums of these, by table
    number  first positions get rows, and new keys are listed
    settle  the other positions take the row of their first

Only insert and, for keys without a row, count and number access the table; the rest is 30 bytes per
key of sequential memory. So rows follow positions, not the order in which threads ran: the result
is always the same, and that costs too little to make it an option.

Growth. The host keeps an upper bound of the slots in use, and adds every batch's keys to it. Only
if the bound exceeds the allowed load does it read the true number: 48 bytes, log(slots / keys per
batch) times from one growth to the next, and in every call in which one more batch of new keys just
fits. If it doesn't fit, one kernel puts the living keys into twice as many slots, in the stream:
the host doesn't wait. That reads 16 bytes per slot and writes a sector at random per key, as an
insertion does; meanwhile both old and new slots exist. Rows never move. (Moving a piece with every
batch would spread this kernel over many steps, but every look-up until its end would probe two
tables.)

Rows are those of the CPU's key map: 1, 2, 3, … by first appearance; row 0 belongs to no key, and
its values stay zero. Removal (`hash_table_maintenance.py`) leaves keys in their slots, without
rows, until the table is rebuilt. Rows stay dense: the keys of the last rows get the rows that
became free.

`reference/hash_table.py` has the same functions and class with sorted arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.counting import counted
from collective.ops.gpu.device import Device, OneStream
from collective.ops.gpu.partition import scan, tiled
from collective.ops.gpu.segments import STATIC, THREADS, TILE, Segments, plan
from collective.ops.gpu.sources import Source
from collective.ops.gpu.workspace import Workspace

SOURCE = Source(
    "hash_table.cu",
    (
        "hash_table_find",
        "hash_table_insert",
        "hash_table_count",
        "hash_table_number",
        "hash_table_settle",
        "hash_table_remove",
        "hash_table_move",
        "hash_table_rebuild",
        "hash_table_steps",
        "hash_table_set_steps",
    ),
)
MOST_KEYS = 2**30  # in one call
MOST_LOAD = 0.8
FIRST_SLOTS = 2048
MOST_ROWS = 2**31 - 1
STEPS = 2**32  # steps are smaller
_MOST_SLOTS = 2**32 - 4
USED, DEAD, HIGHEST, REFUSED, LOST = range(5)  # as in hash_table.cuh
COUNTERS = 5


class BrokenError(RuntimeError):
    """Says that a hash table's slots contradict its counters."""


class HashTable:
    """Maps keys to the rows 1, 2, 3, …; row 0 belongs to no key.

    Memory: 16 bytes per slot. Using it on another stream than the one on which it was made is a
    RuntimeError.

    Args:
        name: for errors.
        device: has its memory.
        slots: the first number of slots. It grows by itself.
        most_rows: the most rows that there may be: what the values have room for. It may be
            increased later.

    Attributes:
        slots, most_rows: their current values.

    Raises:
        ValueError: too many slots or rows.
        MemoryError: the device has no room for the slots.
    """

    def __init__(
        self, name: str, device: Device, slots: int = FIRST_SLOTS, most_rows: int = MOST_ROWS
    ):
        if not 1 <= most_rows <= MOST_ROWS or not 1 <= slots <= _MOST_SLOTS:
            raise ValueError(
                f"hash table '{name}': {slots:,} slots and {most_rows:,} rows; there can be 1 to "
                f"{_MOST_SLOTS:,} and {MOST_ROWS:,}"
            )
        self.name, self.device, self.most_rows = name, device, most_rows
        self._one_stream = OneStream(f"hash table '{name}'", device)
        self._one_stream.check()
        self._sectors = self._free_sectors(slots)
        self.counters = device.zeros(COUNTERS, np.int64)
        self._most_used = self._most_highest = 0  # upper bounds of the counters

    @property
    def slots(self) -> int:
        return int(self._sectors.size) // 4 * 2 - 2

    @property
    def nbytes(self) -> int:
        """Counts the bytes of the device's memory that it holds."""
        return int(self._sectors.nbytes + self.counters.nbytes)

    def count(self) -> int:
        """Counts the keys, which have the rows up to this one. The host waits for the device."""
        return int(self.read()[HIGHEST])

    # -- for code that launches kernels

    def described(self, first_tile: int = 0, sectors: Any = None, step: int = 0) -> list[int]:
        """Returns the words of struct Table in hash_table.cuh, for other sectors if given. Call it
        for each launch.
        """
        self._one_stream.check()
        sectors, pointer = self._sectors if sectors is None else sectors, self.device.pointer
        return [
            pointer(sectors),
            int(sectors.size) // 4 - 1,
            pointer(self.counters),
            self.most_rows,
            step,
            first_tile,
        ]

    def make_room(self, keys: int) -> None:
        """Grows until `keys` new keys have slots.

        Raises:
            MemoryError: it can't grow; nothing has changed.
        """
        if self._most_used + keys > MOST_LOAD * self.slots:
            used, dead = (int(counter) for counter in self.read()[[USED, DEAD]])
            if used + keys > MOST_LOAD * self.slots:
                self.rebuild(max(slots_for(used - dead + keys), self.slots))
                # Some dead keys may have come back: there is less room than it seems.
                if dead and int(self.read()[USED]) + keys > MOST_LOAD * self.slots:
                    self.rebuild(slots_for(used + keys))
        self._most_used += keys
        self._most_highest += keys

    def rebuild(self, slots: int) -> None:
        """Puts the living keys, for which they must suffice, into `slots` slots. The host waits for
        nothing.

        Raises:
            MemoryError: the device has no room for the new slots in addition to the old ones;
                nothing has changed.
        """
        if slots > _MOST_SLOTS:
            raise MemoryError(
                f"hash table '{self.name}' can not grow to {slots:,} slots: there can be "
                f"{_MOST_SLOTS:,}"
            )
        sectors, before = self._free_sectors(slots), self.slots + 2
        old, new = self.on_device(), self.on_device(sectors)
        self.counters[:HIGHEST].fill(0)
        self.launch("hash_table_rebuild", before, (old, np.int64(before), new))
        self._sectors = sectors

    def refusal(self) -> str | None:
        """Tells, after an insertion, whether keys got no row because none was left; returns the
        error's text.
        """
        if self._most_highest <= self.most_rows:
            return None
        refused = int(self.read()[REFUSED])
        if not refused:
            return None
        self.counters[REFUSED:LOST].fill(0)
        return (
            f"hash table '{self.name}' is full: all of its {self.most_rows:,} rows are taken, and "
            f"{counted(refused, 'new key')} got none"
        )

    def read(self) -> np.ndarray:
        """Reads the counters, [5] int64. The host waits for the device.

        Raises:
            BrokenError: keys were lost since it was last read.
        """
        self._one_stream.check()
        counters = self.device.download(self.counters)
        self._most_used, self._most_highest = int(counters[USED]), int(counters[HIGHEST])
        if counters[LOST]:
            self.counters[LOST:].fill(0)
            raise BrokenError(
                f"hash table '{self.name}': {counted(int(counters[LOST]), 'key')} found no free "
                f"slot and got row 0, though of its {self.slots:,} slots only {self._most_used:,} "
                "are counted as taken. Its memory was overwritten: go back to a checkpoint."
            )
        return counters

    def on_device(self, sectors: Any = None) -> Any:
        """Puts the words of `described` on the device."""
        return self.put(np.array(self.described(0, sectors), np.int64))

    def put(self, values: np.ndarray) -> Any:
        """Puts `values` on the device."""
        array = self.device.empty(values.shape, values.dtype)
        self.device.upload(np.ascontiguousarray(values), array)
        return array

    def empty(self, size: int, dtype: Any, what: str) -> Any:
        """Makes a device array; its MemoryError says for what it was."""
        try:
            return self.device.empty(size, dtype)
        except MemoryError as error:
            raise MemoryError(
                f"hash table '{self.name}' needs {size * np.dtype(dtype).itemsize:,} bytes for "
                f"{what}: {error}"
            ) from error

    def launch(self, kernel: str, threads: int, arguments: tuple[Any, ...]) -> None:
        """Launches a kernel with one thread per key, slot or word."""
        self.device.kernel(SOURCE, kernel)(-(-threads // THREADS), THREADS, arguments)

    def _free_sectors(self, slots: int) -> Any:
        sectors = self.empty(((slots + 1) // 2 + 1) * 4, np.int64, f"{slots:,} slots")
        sectors.fill(0)
        return sectors


def slots_for(keys: int) -> int:
    """Returns how many slots a table that is built for `keys` keys gets: room for twice as many."""
    return int(2 * keys / MOST_LOAD) + 1


class Inserted(NamedTuple):
    """Holds what `find_or_insert` found and made.

    Attributes:
        rows: [K] int64, the row of each key.
        new_keys: [K] int64, of which the first U are defined, U the sum of `new_counts`: the keys
            that got a row in this call, by table, then by first appearance.
        new_rows: [K] int64, their rows.
        new_counts: [T] int32, how many of them each table has.
    """

    rows: Any
    new_keys: Any
    new_rows: Any
    new_counts: Any


class FullError(MemoryError):
    """Says that tables have no rows left for all new keys.

    Attributes:
        inserted: what was found and made nevertheless: `rows` and `new_rows` are 0 for keys that
            got no row. The values of the new rows must be initialised as always.
    """

    def __init__(self, message: str, inserted: Inserted):
        super().__init__(message)
        self.inserted = inserted


def find(tables: Sequence[HashTable], keys: Any, segments: Segments, workspace: Workspace) -> Any:
    """Finds the row of each key, [K] int64, 0 for a key that has none. One kernel; the host waits
    for nothing.

    Bytes moved: 8 K read, 8 K written, and per key one sector of 32 bytes at random, and the
    following sectors if necessary.

    Args:
        tables: T different tables.
        keys: [K] int64, any values.
        segments: M of them with K keys; their sections are tables.
        workspace: holds the result until the next call with it.

    Raises:
        ValueError: a table given twice, a segment without a table, too many keys.
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
    steps: Sequence[int],
    workspace: Workspace,
) -> Inserted:
    """Finds rows of keys, and makes new rows for keys that have none. Launches 5 kernels; the
    module's docstring says when the host reads a counter.

    Bytes moved: per key 8 + 8 for insert, and a sector at random read and written; 8 for count, 8
    for number, 8 for settle. Per key without a row, 4 in insert and count, and its sector again;
    per new key 16 more, and its sector once more.

    Args:
        tables: T different tables.
        keys: [K] int64, any values, in any order; equal keys get the same row.
        segments: M of them with K keys; their sections are tables.
        steps: [T], the step to which this use of a table's keys leads, unless they were used later.
            0 if nobody needs it: existing keys are then only read, as are keys whose last use had
            that step.
        workspace: holds the results until the next call with it.

    Raises:
        ValueError: a table given twice, a segment without a table, too many keys, or a step outside
            of 0 to 2**32 - 1.
        FullError: a table has no rows left for all new keys: the first ones have got theirs, the
            others are missing.
        MemoryError: slots can't grow; no key was inserted.
        BrokenError: raised at the latest when the host next reads a counter: there was no free slot
            for a key, though there must be one.
    """
    _check(tables)
    check_steps(np.asarray(steps))
    if segments.keys > MOST_KEYS:
        raise ValueError(f"{segments.keys:,} keys: there can be {MOST_KEYS:,}")
    device, size = workspace.device, segments.keys
    tiles = tiled(segments, [STATIC] * len(tables), 1, workspace, "hash_table")
    for table, some in zip(
        tables, np.bincount(segments.sections, np.diff(segments.offsets), len(tables))
    ):
        table.make_room(int(some))
    described = workspace.upload(
        "hash_table.tables",
        np.array(
            [
                table.described(int(first), step=int(step))
                for table, first, step in zip(tables, tiles.plan.section_tiles, steps)
            ],
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
    device.kernel(SOURCE, "hash_table_insert")(count, THREADS, (*by_tile, rows, slots))
    device.kernel(SOURCE, "hash_table_count")(
        count, THREADS, (*by_tile, rows, slots, *sums), shared=4
    )
    scan(tiles, 1, workspace, "hash_table")
    device.kernel(SOURCE, "hash_table_number")(
        count,
        THREADS,
        (*by_tile, rows, slots, *sums, tiles.starts, new_keys, new_rows),
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


def check_steps(steps: np.ndarray) -> None:
    """Raises ValueError unless a slot can hold each of these steps."""
    if len(steps) and not (0 <= steps.min() and steps.max() < STEPS):
        raise ValueError(
            f"steps from {steps.min():,} to {steps.max():,}: they can be from 0 to {STEPS - 1:,}"
        )
