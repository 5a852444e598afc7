"""Maps any int64 keys to rows of dynamic tables: hash tables in the device's memory.

Slots are 16 bytes: the key, its row, and the step to which its last use led. A sector of 32 bytes,
the least that memory moves, has two of them: at a load of 3/4 a key that is there is found after
1.7 sectors on average, one that isn't after 4.6 that lie side by side. Each thread probes by itself
and has four keys in flight. A group of threads for each key would read lines of 128 bytes, most of
it for nothing, and make one probe where a warp makes 32.

`find` is one kernel. `find_or_insert` is five, all tables of a group at once:

    insert  every key finds or takes a slot; of keys without a row, the slot comes to hold the first
    position
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
values stay zero. Removal (`hash_table_maintenance.py`) leaves keys in their slots, without rows,
until the table is rebuilt; rows stay dense, as the keys of the last ones get those that became
free.

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
MOST_KEYS = 2**30  # of one call
MOST_LOAD = 0.8
FIRST_SLOTS = 2048
MOST_ROWS = 2**31 - 1
STEPS = 2**32  # steps are below
_MOST_SLOTS = 2**32 - 4
USED, DEAD, HIGHEST, REFUSED, LOST = range(5)  # as in hash_table.cuh
COUNTERS = 5


class BrokenError(RuntimeError):
    """Says that a hash table's slots aren't what its counters say."""


class HashTable:
    """Maps keys to the rows 1, 2, 3, …; row 0 belongs to no key.

    Memory: 16 bytes a slot. Whatever is done with it on another stream than that on which it was
    made is a RuntimeError.

    Args:
        name: for errors.
        device: where it lies.
        slots: how many it has at first. It grows by itself.
        most_rows: how many rows there may be: what the values have room for. It may be set higher
            later.

    Attributes:
        slots, most_rows: as above, now.

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
        self._most_used = self._most_highest = 0  # bounds of the counters

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

    # -- for what launches kernels

    def described(self, first_tile: int = 0, sectors: Any = None, step: int = 0) -> list[int]:
        """Returns the words of struct Table in hash_table.cuh, of other sectors if they are given.
        To be called for each launch.
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
        """Grows until `keys` new ones have slots.

        Raises:
            MemoryError: it can not; nothing has changed.
        """
        if self._most_used + keys > MOST_LOAD * self.slots:
            used, dead = (int(counter) for counter in self.read()[[USED, DEAD]])
            if used + keys > MOST_LOAD * self.slots:
                self.rebuild(max(slots_for(used - dead + keys), self.slots))
                # Some of the dead may have come back: there is less room than it seems.
                if dead and int(self.read()[USED]) + keys > MOST_LOAD * self.slots:
                    self.rebuild(slots_for(used + keys))
        self._most_used += keys
        self._most_highest += keys

    def rebuild(self, slots: int) -> None:
        """Puts what lives, for which they must be enough, into so many slots. The host waits for
        nothing.

        Raises:
            MemoryError: the device has no room for them in addition to the old ones; nothing has
                changed.
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
        """Says, after an insertion, whether keys have got no row since there was none left; returns
        the error's text.
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
        """Puts `described` on the device."""
        return self.put(np.array(self.described(0, sectors), np.int64))

    def put(self, values: np.ndarray) -> Any:
        """Puts `values` on the device."""
        array = self.device.empty(values.shape, values.dtype)
        self.device.upload(np.ascontiguousarray(values), array)
        return array

    def empty(self, size: int, dtype: Any, what: str) -> Any:
        """Makes an array of the device; its MemoryError names the purpose."""
        try:
            return self.device.empty(size, dtype)
        except MemoryError as error:
            raise MemoryError(
                f"hash table '{self.name}' needs {size * np.dtype(dtype).itemsize:,} bytes for "
                f"{what}: {error}"
            ) from error

    def launch(self, kernel: str, threads: int, arguments: tuple[Any, ...]) -> None:
        """Launches a kernel of one thread for each key, slot or word."""
        self.device.kernel(SOURCE, kernel)(-(-threads // THREADS), THREADS, arguments)

    def _free_sectors(self, slots: int) -> Any:
        sectors = self.empty(((slots + 1) // 2 + 1) * 4, np.int64, f"{slots:,} slots")
        sectors.fill(0)
        return sectors


def slots_for(keys: int) -> int:
    """Returns how many slots a table gets that is built for so many keys, and as many more."""
    return int(2 * keys / MOST_LOAD) + 1


class Inserted(NamedTuple):
    """Holds what `find_or_insert` found and made.

    Attributes:
        rows: [K] int64, the row of each key.
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
    """Says that tables have had no rows left for all new keys.

    Attributes:
        inserted: what was found and made nevertheless: `rows` and `new_rows` are 0 where there was
            none left. The values of the new rows must be made as ever.
    """

    def __init__(self, message: str, inserted: Inserted):
        super().__init__(message)
        self.inserted = inserted


def find(tables: Sequence[HashTable], keys: Any, segments: Segments, workspace: Workspace) -> Any:
    """Finds the row of each key, [K] int64, 0 for a key that has none. One kernel; the host waits
    for nothing.

    Bytes moved: 8 K read, 8 K written, and of each key one sector of 32 bytes at random, and
    those that follow it if need be.

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
    steps: Sequence[int],
    workspace: Workspace,
) -> Inserted:
    """Finds rows of keys, and makes new ones for keys that have none. Launches 5 kernels; the page
    of the module says when the host reads a counter.

    Bytes moved: of each key 8 + 8 for insert, and a sector at random read and written; 8 for count,
    8 for number, 8 for settle. Of a key without a row 4 in insert and count, and its sector again;
    of a new one 16 more, and its sector once more.

    Args:
        tables: T different ones.
        keys: [K] int64, any values, in any order; equal ones get the same row.
        segments: M of them with K keys; their sections are tables.
        steps: [T], to which this use of a table's keys leads, unless they were used later. 0 where
            nobody asks for it: keys that are there are then only read, as they are with the step
            of their last use.
        workspace: where results lie until the next call with it.

    Raises:
        ValueError: a table given twice, a segment of no table, too many keys, or a step that isn't
            from 0 to 2**32 - 1.
        FullError: a table has no rows left for all new keys: those that came first have theirs, the
            others are not there.
        MemoryError: slots can't grow; no key was inserted.
        BrokenError: at the latest when the host next reads a counter: there was no free slot for a
            key, though there must be.
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
