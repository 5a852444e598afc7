"""Counts the keys of a dynamic table that are added, evicted and come back, and reports them.

    a key gets a row ──► admitted         a policy lets none have one ──► refused
    a row is evicted ──► evicted, by the option that said so; its key comes back ──► returned

Nothing is counted in a step: the numbers are taken from the store when rows are removed, or on
request.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from collective.ops import key_hashing

KEY_BYTES = 8
REMEMBERED = 1 << 20  # Places for keys that were evicted, of 4 bytes.


class EvictedKeys:
    """Remembers keys that were evicted, in 4 MB: about the last million of them.

    A key has one place, and is forgotten when another key takes it. Two keys are mistaken for each
    other in one of 2 billion cases.
    """

    def __init__(self) -> None:
        self._marks = np.zeros(REMEMBERED, np.uint32)

    def add(self, keys: np.ndarray) -> None:
        """Remembers `keys` [K]."""
        places, marks = self._places_and_marks(keys)
        self._marks[places] = marks

    def take(self, keys: np.ndarray) -> int:
        """Forgets `keys` [K], each given once, and returns how many it knew."""
        places, marks = self._places_and_marks(keys)
        known = places[self._marks[places] == marks]
        self._marks[known] = 0
        return len(known)

    @staticmethod
    def _places_and_marks(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # The keys of a rank have the same lowest bits of the hash.
        mixed = key_hashing.mix_np(keys)
        places = (mixed >> np.uint64(44)).astype(np.int64) % REMEMBERED
        return places, (mixed >> np.uint64(12)).astype(np.uint32) | np.uint32(1)


class KeyTally:
    """Counts the keys of one store.

    Attributes:
        evicted: rows that were evicted, by the option of the policy that evicted them.
    """

    def __init__(self) -> None:
        self.evicted = collections.Counter[str]()
        self._admitted = self._returned = 0
        self._seen = self._seen_in_memory = 0  # So many rows of the store have been counted.
        self._evicted_keys: EvictedKeys | None = None

    def count(self, store: Any) -> None:
        """Counts the rows that have come since the last call, the last ones in memory.

        These may include rows that came from the file of `store`. They were counted before they
        went there, and so aren't known as evicted.
        """
        rows, in_memory = len(store), store.count_in_memory
        self._admitted += max(0, rows - self._seen)
        if self._evicted_keys is not None and in_memory > self._seen_in_memory:
            keys = store.keys.keys(self._seen_in_memory + 1, in_memory + 1)
            self._returned += self._evicted_keys.take(keys)
        self._seen, self._seen_in_memory = rows, in_memory

    def settle(self, store: Any) -> None:
        """Takes note of the rows that `store` has now, after changes outside of training."""
        self._seen, self._seen_in_memory = len(store), store.count_in_memory

    def evict(self, store: Any, keys_by_option: Mapping[str, np.ndarray]) -> None:
        """Counts keys whose rows are about to be evicted.

        Args:
            store: the store.
            keys_by_option: [K] int64, by the option that evicts them.
        """
        self.count(store)
        for option, keys in keys_by_option.items():
            if len(keys):
                self._evicted_keys = self._evicted_keys or EvictedKeys()
                self._evicted_keys.add(keys)
                self.evicted[option] += len(keys)

    def statistics(self, store: Any, columns: Sequence[Any]) -> TableStatistics:
        """Describes `store`.

        Args:
            store: the store.
            columns: the table and its slots: each row has an element of each.
        """
        self.count(store)
        rows = len(store)
        row_bytes = KEY_BYTES + sum(column.dim * column.dtype.size for column in columns)
        return TableStatistics(
            rows=rows,
            bytes=rows * row_bytes,
            admitted=self._admitted,
            refused=store.refused,
            evicted=dict(self.evicted),
            returned=self._returned,
        )


@dataclasses.dataclass(frozen=True)
class TableStatistics:
    """Describes a rank's part of a dynamic table since its session initialized or restored it.

    Attributes:
        rows: how many it has now, including those in its file.
        bytes: what they take, with their keys and slots.
        admitted: how often training gave a key a row. Rows that were restored or imported aren't
            counted.
        refused: how often the policy refused a key a row.
        evicted: how many rows each option of the `collective.TablePolicy` evicted; options that
            evicted none are left out. Rows that were removed otherwise aren't counted.
        returned: how many of the admitted keys had been evicted before, as far as known (about the
            last million evicted keys are remembered).
    """

    rows: int
    bytes: int
    admitted: int
    refused: int
    evicted: dict[str, int]
    returned: int

    def counts(self) -> dict[str, int]:
        """Returns all numbers by name, such as 'evicted by capacity'."""
        counts = {
            "rows": self.rows,
            "bytes": self.bytes,
            "admitted": self.admitted,
            "refused": self.refused,
            "returned": self.returned,
        }
        counts.update((f"evicted by {option}", rows) for option, rows in self.evicted.items())
        return counts
