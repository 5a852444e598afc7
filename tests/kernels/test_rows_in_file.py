"""A store with a file has the rows that one in memory has, wherever they are."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.rows import rows_in_file as compiled
from collective.policy import TablePolicy
from collective.tables.rows import initializers, row_store
from collective.tables.rows.rows_in_file import StoreWithFile

D = 5
FIRST = np.array([0.5, -2], np.float32)  # the row that a slot starts from
ROW_BYTES = 4 * D + 8 + 2 * 4  # with the slots


def stores(folder: Path, memory_rows: int) -> tuple[StoreWithFile, row_store.Store]:
    """Makes a store with a file, and one in memory."""
    fill = initializers.by_key(tf.truncated_normal_initializer(stddev=0.5), D, "t")
    shape: Any = 10**6, D, np.float32, "t", fill
    policy = TablePolicy(
        storage="dram_ssd", storage_path=str(folder), storage_size=memory_rows * ROW_BYTES
    )
    return StoreWithFile(*shape, policy), row_store.host_store(*shape)


def slots() -> list[Any]:
    """Makes a slot that starts from zeros, and one that doesn't."""
    return [
        row_store.host_column(10**6, dim, dtype, first, True)
        for dim, dtype, first in ((1, np.int64, None), (2, np.float32, FIRST))
    ]


def read(store: Any, columns: list[Any], keys: np.ndarray) -> list[np.ndarray]:
    return store.read([store.values, *columns], keys, store.locate(keys))


def equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(found, wanted):
        np.testing.assert_array_equal(a, b)


class Pair:
    """Does the same to a store with a file and to one in memory."""

    def __init__(self, folder: Path, memory_rows: int):
        self.pair = stores(folder, memory_rows)
        self.columns: list[list[Any]] = [[], []]
        self.memory_rows = memory_rows

    def add_slots(self) -> None:
        for columns in self.columns:
            columns += slots()

    def train(self, keys: np.ndarray, step: int) -> None:
        """Changes the rows of `keys`, and what slots have of them, in place."""
        for store, columns in zip(self.pair, self.columns):
            rows = store.rows(keys, True)
            assert (rows > 0).all()
            for column in columns:
                column.initialize_rows(store.count_in_memory)
            for c, column in enumerate((store.values, *columns)):
                values = column.read(rows)
                column.write(rows, (values * 3 + step + c + np.arange(len(keys))[:, None]) % 1001)

    def limit(self) -> None:
        self.pair[0].limit_memory(self.columns[0])
        row_bytes = ROW_BYTES if self.columns[0] else 4 * D
        assert self.pair[0].count_in_memory <= self.memory_rows * ROW_BYTES // row_bytes
        assert not self.pair[0].is_overfull

    def remove(self, keys: np.ndarray) -> None:
        removed = [s.remove_keys(keys, c) for s, c in zip(self.pair, self.columns)]
        assert removed[0] == removed[1]

    def check(self) -> None:
        one, other = self.pair
        assert len(one) == len(other)
        pairs = list(zip(one.ascending(37), other.ascending(37)))
        assert sum(len(keys) for (keys, _), _ in pairs) == len(one)
        for (keys, _), (wanted_keys, rows) in pairs:
            np.testing.assert_array_equal(keys, wanted_keys)
            equal(
                read(one, self.columns[0], keys),
                other.read([other.values, *self.columns[1]], wanted_keys, rows),
            )


@pytest.mark.parametrize("memory_rows", [1, 30, 400])
def test_a_store_with_a_file_does_what_one_in_memory_does(tmp_path: Path, memory_rows: int):
    """Slots come, rows go by many ways, the file is written over many times."""
    pair, rng = Pair(tmp_path, memory_rows), np.random.default_rng(memory_rows)
    for step in range(150):
        if step in (20, 90):  # The second time records of two kinds are in the file.
            pair.add_slots()
        keys = np.unique(rng.zipf(1.2, rng.integers(1, 300)) % 2000 * 2**40 - 2**50)
        rng.shuffle(keys)
        known = rng.integers(0, 2000, 50) * 2**40 - 2**50
        if step % 5 != 3:
            pair.train(keys, step)
        elif step % 2:
            for store, columns in zip(pair.pair, pair.columns):  # A reader asks, and inserts none.
                rows = store.rows(known, False)
                found = [column.read(rows) for column in (store.values, *columns)]
                if store is pair.pair[0]:
                    first = found
            assert len(found) == len(first)
            np.testing.assert_array_equal(first[0], found[0])
        else:
            for store in pair.pair:
                store.put(keys, np.full((len(keys), D), step, np.float32))
        if step % 7 == 6:
            pair.remove(np.concatenate([known, known[:3], [5]]))
        if step % 50 == 49:
            cleared = [s.clear(c) for s, c in zip(pair.pair, pair.columns)]
            assert cleared[0] == cleared[1] > 0 and pair.pair[0].file_bytes == 0
        pair.limit()
        if step % 10 == 9:
            pair.check()
    pair.check()


def test_the_file_stays_within_bounds_and_takes_what_is_left(tmp_path: Path):
    """Rows go and come for ever; less than half of the file, and a few segments, is dead."""
    pair = Pair(tmp_path, 500)
    pair.add_slots()
    store, rng, largest = pair.pair[0], np.random.default_rng(0), 0
    everyone = np.arange(5000)
    pair.train(everyone, 0)
    for step in range(1, 200):
        pair.train(rng.choice(everyone, 400, replace=False), step)
        pair.limit()
        largest = max(largest, store.file_bytes)
    pair.check()
    assert 0 < largest <= 2 * 5000 * (8 + ROW_BYTES) + 6 * 4096
    assert list(tmp_path.iterdir()) == []  # The file has no name.


def test_rows_that_were_used_longest_ago_go(tmp_path: Path):
    store, _ = stores(tmp_path, 100)
    for first in range(0, 400, 40):
        store.rows(np.arange(first, first + 40), True)
        store.rows(np.arange(10), False)
    store.limit_memory(slots())
    rows = store.locate(np.arange(400))
    in_memory = np.flatnonzero((rows > 0) & (rows < compiled.IN_FILE))
    # 100 rows less an eighth: the ten that are always used, and the last ones.
    assert len(in_memory) == 88
    assert set(range(10)) | set(range(360, 400)) <= set(in_memory.tolist())
    assert (rows > 0).all() and len(store) == 400


def open_files(folder: Path) -> list[str]:
    """Returns the descriptors of this process that are open in a folder."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        with contextlib.suppress(FileNotFoundError):  # That of the list itself.
            if os.readlink(path).startswith(str(folder)):
                found.append(path)
    return found


def test_two_stores_share_a_folder_and_leave_nothing(tmp_path: Path):
    pairs = [Pair(tmp_path / "not" / "there", 20) for _ in range(2)]
    for shift, pair in enumerate(pairs):
        pair.train(np.arange(1000) * (shift + 1), shift)
        pair.limit()
    for pair in pairs:
        pair.check()
    assert len(open_files(tmp_path)) == 2 and not list((tmp_path / "not" / "there").iterdir())
    del pairs, pair
    gc.collect()
    assert not open_files(tmp_path)


def test_a_full_disk_loses_no_row(tmp_path: Path):
    pair = Pair(tmp_path, 50)
    pair.add_slots()
    store = pair.pair[0]
    pair.train(np.arange(400), 1)
    pair.limit()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.file_bytes, before[1]))
    words = rf"dynamic table 't': its file in '{tmp_path}' can not be written: .*stay in memory"
    try:
        pair.train(np.arange(400, 4000), 2)
        for _ in range(2):
            with pytest.raises(OSError, match=words):
                store.limit_memory(pair.columns[0])
        assert store.is_overfull and compiled.any_is_overfull()
        pair.check()
        pair.train(np.arange(0, 4000, 7), 3)
        pair.check()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    pair.limit()  # There is room again.
    pair.train(np.arange(0, 4000, 3), 4)
    pair.limit()
    pair.check()
    assert not compiled.any_is_overfull()


def test_a_file_that_can_not_be_read_is_an_error(tmp_path: Path):
    pair = Pair(tmp_path, 50)
    store = pair.pair[0]
    pair.train(np.arange(4000), 1)
    store.limit_memory([])
    (path,) = open_files(tmp_path)
    os.truncate(path, 100)
    count, words = store.count_in_memory, f"table 't': its file in '{tmp_path}' can not be read"
    for ask in (
        lambda: store.rows(np.arange(4000), True),
        lambda: store.read([store.values], np.arange(4000), None),
        lambda: store.put(np.arange(4000), np.zeros((4000, D))),
    ):
        with pytest.raises((OSError, RuntimeError), match=words):
            ask()
    assert store.count_in_memory == count and len(store) == 4000


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(OSError, match=f"dynamic table 't': .*'{path}'.* can not be made"):
            stores(path, 10)
