"""What there is of a hash table: slots, counters and free rows in the device's memory.
`hash_table.py` says how it works.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.ops.gpu.device import Device, OneStream
from collective.ops.gpu.segments import THREADS
from collective.ops.gpu.sources import Source

SOURCE = Source(
    "hash_table.cu",
    (
        "hash_table_find",
        "hash_table_insert",
        "hash_table_count",
        "hash_table_number",
        "hash_table_settle",
        "hash_table_remove",
        "hash_table_remove_unused",
        "hash_table_mark_free",
        "hash_table_count_free",
        "hash_table_list_free",
        "hash_table_rebuild",
        "hash_table_export",
        "hash_table_set_steps",
    ),
)
MOST_LOAD = 0.8
MOST_ROWS = 2**31 - 1
STEPS = 2**30  # steps are below
_MOST_SLOTS = 2**32 - 4
USED, DEAD, HIGHEST, FREE_FIRST, FREE_END, REFUSED, LOST = range(7)  # as in hash_table.cuh
COUNTERS = 7


class BrokenError(RuntimeError):
    """A hash table's slots aren't what its counters say."""


class HashTable:
    """Rows 1, 2, 3, … of keys; row 0 belongs to no key.

    New keys take the lowest rows that removal has freed, then new ones. Memory: 16 bytes a slot;
    once keys were removed, up to 4 for each row. Whatever is done with it on another stream than
    that on which it was made is a RuntimeError.

    Args:
        name: for errors.
        device: where it lies.
        slots: how many it has at first. It grows by itself.
        most_rows: how many rows there may be: what the values have room for. It may be set higher
            later.
        filter_freq: a key gets a row once it was seen so many times; 1: at once.

    Attributes:
        slots, most_rows: as above, now.

    Raises:
        ValueError: too many slots or rows, or a filter_freq that isn't positive.
        MemoryError: the device has no room for the slots.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        slots: int = 2048,
        most_rows: int = MOST_ROWS,
        filter_freq: int = 1,
    ):
        if (
            not 1 <= most_rows <= MOST_ROWS
            or not 1 <= filter_freq < STEPS
            or not 1 <= slots <= _MOST_SLOTS
        ):
            raise ValueError(
                f"hash table '{name}': {slots:,} slots, {most_rows:,} rows and "
                f"filter_freq {filter_freq:,}; "
                f"there can be 1 to {_MOST_SLOTS:,}, {MOST_ROWS:,} and {STEPS - 1:,}"
            )
        self.name, self.device, self.most_rows, self.filter_freq = (
            name,
            device,
            most_rows,
            filter_freq,
        )
        self._one_stream = OneStream(f"hash table '{name}'", device)
        self._one_stream.check()
        self._sectors = self._free_sectors(slots)
        self.counters = device.zeros(COUNTERS, np.int64)
        self.free_rows = device.empty(1, np.uint32)
        self._most_used = self._most_highest = 0  # bounds of the counters

    @property
    def slots(self) -> int:
        return int(self._sectors.size) // 4 * 2 - 2

    @property
    def nbytes(self) -> int:
        """Memory of the device that it holds."""
        return int(self._sectors.nbytes + self.counters.nbytes + self.free_rows.nbytes)

    @property
    def highest_bound(self) -> int:
        """No row is above; known without waiting for the device."""
        return min(self._most_highest, self.most_rows)

    def count(self) -> int:
        """The keys that have rows. The host waits for the device."""
        counters = self.read()
        return int(counters[HIGHEST] - counters[FREE_END] + counters[FREE_FIRST])

    def highest(self) -> int:
        """The highest row that a key ever had: rows 0 to this need values. The host waits for the
        device.
        """
        return int(self.read()[HIGHEST])

    # -- for what launches kernels

    def described(self, first_tile: int = 0, sectors: Any = None) -> list[int]:
        """The words of struct Table in hash_table.cuh, of other sectors if they are given. Whoever
        launches asks for them.
        """
        self._one_stream.check()
        sectors, pointer = self._sectors if sectors is None else sectors, self.device.pointer
        return [
            pointer(sectors),
            int(sectors.size) // 4 - 1,
            pointer(self.counters),
            pointer(self.free_rows),
            self.most_rows,
            self.filter_freq,
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
                self.rebuild(int(2 * (used - dead + keys) / MOST_LOAD) + 1)
                # Some of the dead may have come back: there is less room than it seems.
                if dead and int(self.read()[USED]) + keys > MOST_LOAD * self.slots:
                    self.rebuild(int(2 * (used + keys) / MOST_LOAD) + 1)
        self._most_used += keys
        self._most_highest += keys

    def rebuild(self, slots: int) -> None:
        """Puts what lives into so many slots, not fewer than there are. The host waits for nothing.

        Raises:
            MemoryError: the device has no room for them beside the old ones; nothing has changed.
        """
        slots = max(slots, self.slots)
        if slots > _MOST_SLOTS:
            raise MemoryError(
                f"hash table '{self.name}' can not grow to {slots:,} slots: there "
                f"can be {_MOST_SLOTS:,}"
            )
        sectors, before = self._free_sectors(slots), self.slots + 2
        old, new = self.on_device(), self.on_device(sectors)
        self.counters[:HIGHEST].fill(0)
        self.launch("hash_table_rebuild", before, (old, np.int64(before), new))
        self._sectors = sectors

    def refusal(self) -> str | None:
        """After an insertion: what to say if keys have got no row since there was none left."""
        if self._most_highest <= self.most_rows:
            return None
        refused = int(self.read()[REFUSED])
        if not refused:
            return None
        self.counters[REFUSED:LOST].fill(0)
        return (
            f"hash table '{self.name}' is full: all of its {self.most_rows:,} rows are taken, "
            f"and {refused:,} new keys "
            "have got none. Remove keys, or make room for the values of more rows and set "
            "most_rows."
        )

    def read(self) -> np.ndarray:
        """[7] int64, the counters. The host waits for the device.

        Raises:
            BrokenError: keys were lost since it was last read.
        """
        self._one_stream.check()
        counters = self.device.download(self.counters)
        self._most_used, self._most_highest = int(counters[USED]), int(counters[HIGHEST])
        if counters[LOST]:
            self.counters[LOST:].fill(0)
            raise BrokenError(
                f"hash table '{self.name}': {int(counters[LOST]):,} keys found no "
                f"free slot and have got row 0, "
                f"though of its {self.slots:,} slots only {self._most_used:,} are "
                f"counted as taken. Its memory "
                "was overwritten: go back to a checkpoint."
            )
        return counters

    def on_device(self, sectors: Any = None) -> Any:
        """`described` on the device."""
        return self.put(np.array(self.described(0, sectors), np.int64))

    def put(self, values: np.ndarray) -> Any:
        """`values` on the device."""
        array = self.device.empty(values.shape, values.dtype)
        self.device.upload(np.ascontiguousarray(values), array)
        return array

    def empty(self, size: int, dtype: Any, what: str) -> Any:
        """An array of the device; raises MemoryError that says for `what`."""
        try:
            return self.device.empty(size, dtype)
        except MemoryError as error:
            raise MemoryError(
                f"hash table '{self.name}' needs "
                f"{size * np.dtype(dtype).itemsize:,} bytes for {what}: {error}"
            ) from error

    def launch(self, kernel: str, threads: int, arguments: tuple[Any, ...]) -> None:
        """A kernel of one thread for each key, slot or word."""
        self.device.kernel(SOURCE, kernel)(-(-threads // THREADS), THREADS, arguments)

    def _free_sectors(self, slots: int) -> Any:
        sectors = self.empty(((slots + 1) // 2 + 1) * 4, np.int64, f"{slots:,} slots")
        sectors.fill(0)
        return sectors
