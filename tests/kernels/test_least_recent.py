"""The rows whose last use is longest ago are found in order, in memory and in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.policy import TablePolicy
from collective.tables.rows import initializers, least_recent, row_store
from collective.tables.rows.rows_in_file import StoreWithFile

ROWS_IN_MEMORY = 17


class Uses:
    """Keeps the last uses of a store's rows, compared with a dictionary.

    Args:
        folder: has the store's file; None for a store in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        fill = initializers.by_key(tf.zeros_initializer(), 1, "t")
        shape: Any = 10**5, 1, np.float32, "t", fill
        policy = TablePolicy(
            storage="dram_ssd", storage_path=str(folder), storage_size=ROWS_IN_MEMORY * 12
        )
        self.store = (
            row_store.host_store(*shape) if folder is None else StoreWithFile(*shape, policy)
        )
        self.column = row_store.host_column(10**5, 1, np.int64, None, True)
        self.column.holds_last_uses = True
        self.wanted: dict[int, int] = {}

    @property
    def used(self) -> np.ndarray:
        return self.store.all_last_uses(self.column)

    def use(self, keys: np.ndarray, step: int) -> None:
        rows = self.store.rows(keys, True)
        self.column.view_of(self.store.count_in_memory)[rows - 1] = step
        self.wanted.update((int(key), step) for key in keys)
        self.store.limit_memory([self.column])

    def take(self, count: int, before: int) -> list[int]:
        """Removes rows. Returns their keys, ascending."""
        keys, places = self.store.oldest.take(self.store, self.column, count, before)
        assert self.store.remove_at(keys, places, [self.column]) == len(np.unique(keys))
        assert not self.store.locate(keys).any()
        return sorted(keys.tolist())

    def oldest(self, count: int, before: int) -> list[int]:
        """Returns what `take` must, and forgets it."""
        by_age = sorted((step, key) for key, step in self.wanted.items() if step < before)
        keys = [key for _, key in by_age[:count]]
        for key in keys:
            del self.wanted[key]
        return sorted(keys)


@pytest.fixture(params=["memory", "file"])
def uses(request: pytest.FixtureRequest, tmp_path: Path) -> Uses:
    return Uses(tmp_path if request.param == "file" else None)


@pytest.mark.parametrize("sorted_at_once", [1, 7, 1 << 12])
def test_the_oldest_go_first(sorted_at_once: int, uses: Uses, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(least_recent, "FEWEST_SORTED", sorted_at_once)
    rng = np.random.default_rng(3)
    for step in range(1, 80):
        keys = np.unique(rng.zipf(1.3, 40) % 300) * 2**33 - 5
        uses.use(keys, step)
        if step % 9 == 0:  # removed otherwise, and back later
            gone = keys[:3]
            uses.store.remove_keys(gone, [uses.column])
            for key in gone:
                del uses.wanted[int(key)]
        excess = len(uses.store) - 60
        if step % 5 and excess > 0:
            assert uses.take(excess, step) == uses.oldest(excess, step)
        np.testing.assert_array_equal(np.sort(uses.used), sorted(uses.wanted.values()))


def test_rows_in_use_stay_and_others_of_their_age_go_by_key(uses: Uses):
    uses.use(np.arange(100)[::-1].copy(), 1)
    uses.use(np.arange(90, 110), 2)
    assert uses.take(5, 2) == [0, 1, 2, 3, 4]
    assert uses.take(1000, 2) == list(range(5, 90))
    assert uses.take(1, 2) == [] and len(uses.store) == 20
    assert uses.take(3, 3) == [90, 91, 92]


def test_rows_that_no_training_used_are_the_oldest(uses: Uses):
    uses.use(np.arange(5), 3)
    uses.use(np.arange(5, 10), 0)
    assert uses.take(6, 4) == [0, 5, 6, 7, 8, 9]
