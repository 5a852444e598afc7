"""Rows of a store are removed as from a dictionary: keys, values and slots go together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.rows.keymap import KeyMap
from collective.tables.rows import initializers, row_columns, row_store

FIRST = np.array([0.5, -2], np.float32)  # the row that a slot starts from
KINDS = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "numpy"])


def a_store(compiled: bool, capacity: int = 10**6) -> row_store.Store:
    fill = initializers.by_key(tf.truncated_normal_initializer(stddev=0.5), 3, "t")
    return row_store.host_store(capacity, 3, np.float32, "t", fill, compiled)


def slots_of(compiled: bool) -> list[row_columns.HostColumn]:
    """Makes a slot that starts from zeros, and one that doesn't."""
    return [
        row_store.host_column(10**6, dim, dtype, first, compiled)
        for dim, dtype, first in ((1, np.int64, None), (2, np.float32, FIRST))
    ]


def removed(store: row_store.Store, slots: list[row_columns.HostColumn], keys: np.ndarray) -> None:
    rows = np.unique(store.rows(keys, False))
    store.remove(rows[rows > 0], slots)


@KINDS
def test_a_store_forgets_as_a_dictionary_does(compiled: bool):
    store, slots = a_store(compiled), slots_of(compiled)
    rng = np.random.default_rng(2)
    wanted: dict[int, tuple[np.ndarray, int, np.ndarray]] = {}
    for step in range(60):
        keys = np.unique(rng.integers(-400, 400, rng.integers(0, 300))) * 2**33
        rows = store.rows(keys, True)
        drawn = store._fill(keys.view(np.uint64), 3).astype(np.float32)
        for key, values in zip(keys, drawn):
            wanted.setdefault(int(key), (values, 0, FIRST))
        if step % 3:  # else the rows of new keys are beyond those that the slots know of
            slots[1].initialize_rows(len(store))
            for column, values in zip((store.values, *slots), ((step, step), (step,), (step, 1))):
                column.write(rows, np.resize(np.array(values), column.read(rows).shape))
            for key in keys:
                wanted[int(key)] = (np.full(3, step), step, np.array([step, 1]))
        # a few one by one, many at once, all
        going = (
            rng.choice(keys, min(len(keys), 3), replace=False)
            if step % 4
            else np.array(list(wanted))[:: rng.integers(1, 3)]
        )
        removed(store, slots, going)
        for key in going:
            del wanted[int(key)]
        assert len(store) == len(wanted) == store.values.filled
        slots[1].initialize_rows(len(store))
        known = np.array(list(wanted), np.int64)
        rows = store.rows(known, False)
        np.testing.assert_array_equal(np.sort(rows), np.arange(1, len(known) + 1))
        assert not store.rows(going, False).any()
        for part, column in enumerate((store.values, *slots)):
            expected = [np.resize(wanted[int(key)][part], column._shape[1]) for key in known]
            np.testing.assert_array_equal(
                column.read(rows), np.reshape(expected, (len(known), column._shape[1]))
            )
            assert not column.read(np.array([0, len(store) + 1])).any() or part == 2
        listed = [key for keys_, _ in store.ascending(50) for key in keys_]
        assert listed == sorted(wanted)


@pytest.mark.parametrize(
    "keys",
    [
        np.arange(3000),
        np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 3000),
    ],
    ids=["ascending", "random"],
)
@pytest.mark.parametrize("at_once", [1, 40, 500, 3000])
def test_probes_find_what_is_left(keys: np.ndarray, at_once: int):
    """The rows that moved are the last ones, each to a row that was removed."""
    tried = KeyMap(10**5)
    tried.find_or_insert(keys)
    rng = np.random.default_rng(1)
    by_row = dict(enumerate(keys.tolist(), 1))
    while by_row:
        count = min(at_once, len(by_row))
        rows = np.sort(rng.choice(len(by_row), count, replace=False) + 1)
        gone = [by_row.pop(int(row)) for row in rows]
        from_, to = tried.remove(rows)
        for old, new in zip(from_.tolist(), to.tolist()):
            assert new <= len(by_row) < old and new not in by_row
            by_row[new] = by_row.pop(old)
        if at_once > 1 or len(by_row) % 100 == 0:
            left = np.array([by_row[row] for row in range(1, len(by_row) + 1)], np.int64)
            np.testing.assert_array_equal(tried.find(left), np.arange(1, len(left) + 1))
            np.testing.assert_array_equal(tried.keys(1, len(tried) + 1), left)
        assert not tried.find(np.array(gone)).any()


@KINDS
def test_rows_that_are_none_of_the_tables_are_refused(compiled: bool):
    store = a_store(compiled)
    store.rows(np.arange(5), True)
    for rows in ([0], [6], [2, 1], [2, 2], [-1, 3]):
        with pytest.raises(IndexError, match="ascending, of 1 … 5"):
            store.remove(np.array(rows), [])
    assert len(store) == 5


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def memory_of_removed_rows() -> list[int]:
    """Returns what 400,000 rows and a slot take, what half of them, and what as many as before."""
    count, dim, nothing = 400_000, 32, resident()
    fill = initializers.by_key(tf.ones_initializer(), dim, "t")
    store = row_store.host_store(10**7, dim, np.float32, "t", fill)
    slot = row_store.host_column(10**7, dim, np.float32, np.ones(dim, np.float32), True)
    store.rows(np.arange(count), True)
    slot.initialize_rows(count)
    taken = [resident() - nothing]
    removed(store, [slot], np.arange(0, count, 2))
    taken.append(resident() - nothing)
    store.rows(np.arange(count, count + count // 2), True)
    slot.initialize_rows(count)
    return [*taken, resident() - nothing]


def test_memory_of_removed_rows_is_given_back_and_used_again():
    memory_of_removed_rows()  # What the process keeps of the first arrays as large isn't counted.
    all_rows, half, again = memory_of_removed_rows()
    assert all_rows > 2 * 400_000 * 32 * 4
    assert half < 0.65 * all_rows
    assert again < 1.1 * all_rows


def test_the_last_rows_share_a_page_with_those_that_stay():
    """Memory is given back by pages; rows at its ends are made zero."""
    store = row_store.host_store(
        10**6, 3, np.float32, "t", initializers.by_key(tf.ones_initializer(), 3, "t")
    )
    store.rows(np.arange(5000), True)
    store.remove(np.arange(1001, 4001), [])
    values = store.values.read(np.arange(0, 5002))
    assert (values[1:2001] == 1).all() and not values[2001:].any() and not values[0].any()
