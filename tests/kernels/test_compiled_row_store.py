"""Compiled code draws the same initial values as NumPy, bit for bit, and keeps rows alike."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.rows import compiled_row_store, dynamic_rows
from collective.tables.rows import initializers, row_columns, row_store

EDGES = [-(2**63), -(2**63) + 1, -(2**32), -1, 0, 1, 2**32 - 1, 2**32, 2**63 - 1]
TYPES = [tf.float32, tf.float64, tf.float16, tf.bfloat16]
COMPILED = {
    "zeros": tf.zeros_initializer(),
    "ones": tf.ones_initializer(),
    "one number": 0.1,
    "row": lambda dim: list(np.linspace(-3, 3, dim)),
    "uniform": tf.random_uniform_initializer(-0.3, 0.7, seed=3),
    "uniform of whole numbers": tf.random_uniform_initializer(-1, 2),
    "uniform of float32": tf.random_uniform_initializer(np.float32(0.1), np.float32(0.7)),
    "truncated": tf.truncated_normal_initializer(0.1, 0.3, seed=5),
    "tiny": tf.truncated_normal_initializer(stddev=1e-6),
    "huge": tf.truncated_normal_initializer(stddev=5e4),
    "scaled": tf.variance_scaling_initializer(0.7, mode="fan_out"),
    "scaled uniform": tf.variance_scaling_initializer(mode="fan_out", distribution="uniform"),
}
BY_PYTHON = {
    "normal": tf.random_normal_initializer(0.1, 0.3),
    "scaled normal": tf.variance_scaling_initializer(
        mode="fan_out", distribution="untruncated_normal"
    ),
}


def some_keys(count: int) -> np.ndarray:
    rng = np.random.default_rng(4)
    wide, narrow = (
        rng.integers(low, high, count // 2)
        for low, high in ((-(2**63), 2**63 - 1), (-(10**6), 2**33))
    )
    return np.unique(np.concatenate([EDGES, wide, narrow]))


def both_stores(
    init: Any, dim: int, dtype: Any, capacity: int = 10**6
) -> tuple[row_store.Store, row_store.Store]:
    init = init(dim) if type(init).__name__ == "function" else init
    fill = initializers.by_key(init, dim, "t")
    compiled, numpy = (
        row_store.host_store(capacity, dim, dtype, "t", fill, is_compiled)
        for is_compiled in (True, False)
    )
    return compiled, numpy


def drawn(store: row_store.Store, keys: np.ndarray) -> np.ndarray:
    rows = store.rows(keys, True)
    np.testing.assert_array_equal(rows, np.arange(1, len(keys) + 1))
    return store.values.read(rows).view(np.uint8)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", [*COMPILED, *BY_PYTHON])
def test_first_values_are_numpys(name: str, dtype: tf.DType):
    init = {**COMPILED, **BY_PYTHON}[name]
    for dim, keys in ((1, some_keys(3000)), (3, some_keys(2000)), (16, some_keys(20_000))):
        with np.errstate(over="ignore"):
            compiled, numpy = both_stores(init, dim, dtype.as_numpy_dtype)
            np.testing.assert_array_equal(drawn(compiled, keys), drawn(numpy, keys))


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_seeds_are_those_of_numpy(seed: int):
    rows = initializers.RandomRows(
        seed, initializers.Distribution(compiled_row_store.UNIFORM, initializers.uniform, 0.0, 1.0)
    )
    keys = some_keys(1000)
    store = row_store.host_store(10**6, 5, np.float64, "t", rows)
    found = store.values.read(store.rows(keys, True))
    np.testing.assert_array_equal(found, rows(keys.view(np.uint64), 5))


def test_what_compiled_code_draws():
    """A test above would pass, too, if Python drew everything."""
    for dim in (1, 8):
        for name, init in {**COMPILED, **BY_PYTHON}.items():
            init = init(dim) if name == "row" else init
            fill = initializers.by_key(init, dim, "t")
            described = initializers.first_values(fill, dim, np.float32)
            assert (described.kind == compiled_row_store.BY_PYTHON) == (name in BY_PYTHON)


@pytest.mark.parametrize("name", ["truncated", "normal"])
def test_a_store_answers_as_numpys(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(initializers, "BLOCK", 30)  # so that initial values come in several blocks
    monkeypatch.setattr(row_store, "SORTED_AT_ONCE", 50)
    stores = both_stores({**COMPILED, **BY_PYTHON}[name], 3, np.float32)
    rng = np.random.default_rng(1)
    for step in range(6):
        keys = rng.integers(-40, 40, (5, 6)) * 2 ** (7 * step)
        values = rng.normal(size=(20, 3))
        for insert in (False, True):
            one, other = (store.rows(keys, insert) for store in stores)
            assert one.shape == keys.shape
            np.testing.assert_array_equal(one, other)
        put = rng.integers(-40, 40, 20)  # some of them twice
        np.testing.assert_array_equal(*(store.put(put, values) for store in stores))
        assert len(stores[0]) == len(stores[1]) == stores[0].values.filled
        blocks = [list(store.ascending(13)) for store in stores]
        for (keys_, rows), wanted in zip(*blocks):
            np.testing.assert_array_equal((keys_, rows), wanted)
            np.testing.assert_array_equal(*(store.values.read(rows) for store in stores))
    assert not stores[0].values.read(np.array([0])).any()
    with pytest.raises(IndexError):
        stores[0].keys.keys(1, len(stores[0]) + 2)


def test_a_full_table_names_itself_and_keeps_what_it_has():
    for store in both_stores(tf.ones_initializer(), 2, np.float32, capacity=3):
        words = r"^dynamic table 't': it is full: 3 rows of 3\. Train on more ranks"
        with pytest.raises(MemoryError, match=words):
            store.rows(np.arange(5), True)
        with pytest.raises(MemoryError, match=words):
            store.put(np.arange(5), np.zeros((5, 2)))
        assert store.rows(np.arange(5), False).tolist() == [1, 2, 3, 0, 0] and len(store) == 3
        np.testing.assert_array_equal(store.values.read(np.arange(4)), [[0] * 2] + [[1] * 2] * 3)
    with pytest.raises(MemoryError, match="a key map for 4,294,967,296 rows can not be reserved"):
        both_stores(1.0, 1, np.float32, capacity=2**32)


@pytest.mark.parametrize(
    "error, kind, words",
    [
        (MemoryError("none left"), MemoryError, r"^dynamic table 't': none left\. Train on more"),
        (ValueError("wrong"), RuntimeError, "^ValueError: wrong"),
    ],
)
def test_a_row_that_could_not_be_drawn_is_none_until_it_is(
    error: Exception, kind: type, words: str
):
    fails = [True]

    def fill(keys: np.ndarray, dim: int) -> np.ndarray:
        if fails[0] and (keys > 100).any():
            raise error
        return np.tile(keys[:, None], (1, dim))

    store = row_store.host_store(1000, 2, np.float32, "t", fill)
    store.rows(np.arange(10), True)
    for use in (
        lambda: store.rows(np.array([5, 500]), True),
        lambda: store.rows(np.array([5]), False),  # the lock was given back
        lambda: store.put(np.array([5]), np.zeros((1, 2))),
    ):
        with pytest.raises(kind, match=words):
            use()
        assert len(store) == 10 == sum(len(keys) for keys, _ in store.ascending(3))
    fails[0] = False
    rows = store.rows(np.array([500, 5]), False)
    assert rows.tolist() == [11, 6] and len(store) == 11
    assert store.values.read(rows).tolist() == [[500] * 2, [5] * 2]


def test_slots_start_from_their_first_row_once():
    first = np.array([1.5, -2], np.float32)
    column = row_columns.CompiledHostColumn(10**6, 2, np.float32, first)
    column.initialize_rows(3)
    column.write(np.array([2]), np.array([[7, 8]]))
    column.initialize_rows(5000)
    column.initialize_rows(4)
    assert column.filled == 5000
    found = column.read(np.array([0, 1, 2, 3, 5000, 5001]))
    assert found.tolist() == [[0, 0], [1.5, -2], [7, 8], [1.5, -2], [1.5, -2], [0, 0]]


@pytest.mark.timeout(120)
def test_threads_share_a_store():
    """Some of them draw in Python: a lock that is held by who waits for the interpreter would be
    the end, if another held the interpreter and waited for the lock.
    """
    stores = [both_stores(init, 4, np.float32)[0] for init in (BY_PYTHON["normal"], 1.0)]
    errors = []

    def use(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(50):
                for store in stores:
                    keys = rng.integers(-(2**40), 2**40, 300)
                    rows = store.rows(keys, True)
                    np.testing.assert_array_equal(store.rows(keys, False), rows)
                    assert len(list(store.ascending(1000))) >= 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for store in stores:
        keys, rows = (np.concatenate(parts) for parts in zip(*store.ascending(1000)))
        np.testing.assert_array_equal(np.sort(rows), np.arange(1, len(store) + 1))
        wanted = store._fill(keys.view(np.uint64), 4).astype(np.float32)
        np.testing.assert_array_equal(store.values.read(rows), wanted)


def test_a_store_goes_with_its_python_object():
    store = both_stores(BY_PYTHON["normal"], 2, np.float32)[0]
    numbers, gone = (store.number, store.values.number), weakref.ref(store)
    keys = store.keys
    store.rows(np.arange(5), True)
    view = keys.keys(1, 6)
    del keys, store
    gc.collect()
    assert gone() is None and view.tolist() == [0, 1, 2, 3, 4]  # the view keeps its memory
    assert numbers[0] in compiled_row_store._drawing
    del view
    gc.collect()
    assert numbers[0] not in compiled_row_store._drawing
    with tf.Graph().as_default(), tf.Session() as session:
        with pytest.raises(tf.errors.UnknownError, match="memory of a dynamic table is gone"):
            session.run(dynamic_rows.count(tf.constant(numbers[0], tf.int64)))
