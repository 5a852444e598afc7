"""Counts travel with keys, refused keys change nothing, and a Bloom filter is as good as asked."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops import placement
from collective.ops.exchange import embedding_bag
from collective.ops.exchange.embedding_bag import BagMember, Section
from collective.ops.key_hashing import mix_np
from collective.ops.rows.compiled_row_store import FilterShape
from collective.tables.policies import bloom_filter
from collective.tables.rows import initializers, row_store

DYNAMIC, D = embedding_bag.DYNAMIC, 4


@pytest.fixture(autouse=True)
def graph() -> Any:
    with tf.Graph().as_default() as made:
        yield made


def keys(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)


def store_of(shape: FilterShape | None, most: int = 2**63 - 1) -> Any:
    fill = initializers.by_key(tf.zeros_initializer(), D, "t")
    store = row_store.host_store(10**6, D, np.float32, "t", fill).keys
    store.admit_by(2, shape, most, 1.0, 0, 10**6)
    return store


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_counts_travel_with_keys(ranks: int):
    """Of unpooled lookups each distinct key with its count, of pooled ones each key as it comes."""
    pool = keys(7, 1)
    rng = np.random.default_rng(2)
    plain, more, pooled = (rng.choice(pool, n) for n in (30, 1, 11))
    sections = [Section(0, D), Section(1, D), Section(0, D, pooled=True)]
    members = [BagMember(0, D), BagMember(0, D), BagMember(1, D), BagMember(2, D, 1)]
    kinds, counted = [DYNAMIC, DYNAMIC], [True, False]
    ids = [plain, more, plain, pooled]
    samples = [np.repeat(np.arange(4), 3)[:11]]
    request = embedding_bag.request(
        [tf.constant(x) for x in ids],
        [tf.constant(samples[0], tf.int64)],
        [],
        members,
        sections,
        kinds,
        ranks,
        counted,
    )
    with tf.Session() as session:
        message, splits = session.run([request.message, request.splits])
        found = collections.Counter()
        ends = np.cumsum(splits)
        for rank, (first, end) in enumerate(zip(ends - splits, ends)):
            # Each rank hears the words for it from every rank.
            response = embedding_bag.respond(
                tf.constant(np.tile(message[first:end], ranks)),
                tf.constant(np.full(ranks, end - first, np.int32)),
                sections,
                kinds,
                ranks,
                counted,
            )
            heard, (counts,) = session.run([response.keys, response.counts])
            assert (placement.dynamic(ranks).owner(heard[0]) == rank).all()
            assert len(counts) == len(heard[0])
            for key, count in zip(heard[0], counts):
                found[int(key)] += int(count)
    want = collections.Counter(np.concatenate([plain, more, pooled]).tolist())
    assert found == {key: ranks * count for key, count in want.items()}


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_unseen_rows_are_read_as_row_0(max_norm: float):
    """Rows from 1 are read and updated; -1 is none; -1 - r reads row 0, and r is updated."""
    values = np.random.default_rng(3).normal(size=(6, D)).astype(np.float32)
    variable = tf.Variable(values, use_resource=True)
    pooled = bool(max_norm)
    sections = [Section(0, D, pooled=pooled, max_norm=max_norm)]
    ids, rows = np.arange(6), np.array([3, -1, -1 - 2, -1, 5, -1 - 2])
    combiner = embedding_bag.SUM if pooled else embedding_bag.ROWS
    request = embedding_bag.request(
        [tf.constant(ids)],
        [tf.constant(ids)] if pooled else [],
        [],
        [BagMember(0, D, combiner)],
        sections,
        [DYNAMIC],
        1,
    )

    def gather(rows: np.ndarray) -> tf.Tensor:
        return embedding_bag.gather(
            [variable.handle],
            [tf.constant(rows)],
            request.message,
            request.splits,
            sections,
            [DYNAMIC],
            1,
            [tf.TensorShape([None, D])],
        )

    flat, plain = gather(rows), gather(np.maximum(rows, 0))
    weights = tf.constant(np.random.default_rng(4).normal(size=6 * D), tf.float32)
    scale = tf.Variable(1.0)
    of_rows = tf.gradients(tf.reduce_sum(flat * weights) * scale, variable.handle)[0]
    of_plain = tf.gradients(tf.reduce_sum(plain * weights), variable.handle)[0]
    fetches = [flat, plain, weights, (of_rows.indices, of_rows.values)]
    if not pooled:
        # The norm of the gradient of rows has a gradient, too.
        fetches.append(tf.gradients(tf.reduce_sum(of_rows.values**2), scale)[0])
        fetches.append(of_rows.values)
    else:
        fetches.append(tf.gradients(tf.reduce_sum(plain * weights), plain)[0])
        fetches.append((of_plain.indices, of_plain.values))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        read, expected, given, (indices, gradients), extra, last = session.run(fetches)
    np.testing.assert_array_equal(read, expected)
    by_row = dict(zip(indices.tolist(), gradients))
    assert sorted(by_row) == [2, 3, 5]
    if pooled:
        of_seen = dict(zip(last[0].tolist(), last[1]))
        np.testing.assert_allclose(by_row[3], of_seen[3])
        np.testing.assert_allclose(by_row[5], of_seen[5])
        return
    given = given.reshape(6, D)
    for row, places in ((3, [0]), (5, [4]), (2, [2, 5])):
        np.testing.assert_allclose(by_row[row], given[places].sum(0), rtol=1e-6)
    np.testing.assert_allclose(extra, 2 * (last**2).sum(), rtol=1e-5)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("elements, probability", [(20_000, 0.02), (3000, 0.2)])
def test_a_bloom_filter_is_as_good_as_asked_for(elements: int, probability: float, step: int):
    """It misses no occurrence; of keys that never came, fewer have counts than asked for."""
    hashes, cells = bloom_filter.size(elements, probability)
    shape = FilterShape(hashes, cells, np.dtype("uint16"), bloom_filter.PARTITIONS, step)
    all_keys = keys(2 * elements, 5)
    partitions = (mix_np(all_keys) % np.uint64(bloom_filter.PARTITIONS)).astype(np.int64)
    all_keys = all_keys[partitions % step == 0]
    came, others = all_keys[: elements // step], all_keys[elements // step :]
    counts = np.random.default_rng(6).integers(1, 5, len(came))
    store = store_of(shape)
    store.add_counts(came, counts)
    assert (known(store.cells(), came, shape) >= counts).all()
    rate = (known(store.cells(), others, shape) > 0).mean()
    # A small filter is better than asked for: a partition has eight counters at least.
    assert (probability / 4 if elements > 10_000 else 0) < rate < probability
    # Its memory is that of ten counters a key for 1%.
    bits = -np.log(probability) / np.log(2) ** 2
    assert bloom_filter.PARTITIONS * cells < 1.6 * bits * elements + 8 * bloom_filter.PARTITIONS
    store.forget(None)
    assert not store.cells().any()


def known(cells: np.ndarray, of: np.ndarray, shape: FilterShape) -> np.ndarray:
    """Returns the counts that a filter knows of keys, computed by NumPy."""

    def hashed(seed: int) -> np.ndarray:
        return initializers.hashed(seed, of.view(np.uint64))

    first, stride = hashed(0x8CB92BA72F3D8DD7), hashed(0xAEF17502108EF2D9) | np.uint64(1)
    rows = (mix_np(of) % np.uint64(shape.partitions)).astype(np.int64) // shape.step
    least = np.full(len(of), np.iinfo(np.int64).max)
    for i in range(shape.hashes):
        with np.errstate(over="ignore"):
            at = mix_np((first + np.uint64(i) * stride).view(np.int64))
        low, high = at & np.uint64(2**32 - 1), at >> np.uint64(32)
        cell = (
            high * np.uint64(shape.cells) + (low * np.uint64(shape.cells) >> np.uint64(32))
        ) >> (np.uint64(32))
        least = np.minimum(least, cells[rows, cell.astype(np.int64)])
    return least


@pytest.mark.parametrize("name, most", [("uint8", 255), ("uint16", 2**16 - 1), ("uint64", 2**40)])
def test_counters_stay_where_they_are_full(name: str, most: int):
    store = store_of(FilterShape(3, 8, np.dtype(name), bloom_filter.PARTITIONS, 1), most)
    some = keys(1, 7)
    for count in (most - 1, 5, most):
        store.add_counts(some, np.array([count]))
    assert store.cells().max() == most and (store.cells() > 0).sum() <= 3


def test_exact_counts_are_those_of_a_dictionary():
    store, want = store_of(None), collections.Counter()
    rng = np.random.default_rng(8)
    pool = keys(5000, 9)
    for _ in range(20):
        some = rng.choice(pool, 1000)
        counts = rng.integers(1, 9, 1000)
        store.add_counts(some, counts)
        for key, count in zip(some.tolist(), counts.tolist()):
            want[key] += count
        gone = rng.choice(pool, 300)
        store.forget(gone)
        for key in gone.tolist():
            want.pop(key, None)
        found, found_counts = store.counts()
        assert dict(zip(found.tolist(), found_counts.tolist())) == want
    store.forget(None)
    assert len(store.counts()[0]) == 0


def test_keys_of_partitions_are_found_again():
    numbers = np.array([0, 1, 2, 6719, 2**40 + 5])
    np.testing.assert_array_equal(mix_np(bloom_filter.keys(numbers)).view(np.int64), numbers)
    for ranks, step in ((1, 1), (4, 4), (11, 1), (9, 3), (128, 64)):
        for rank in (0, ranks - 1):
            of_rank = bloom_filter.numbers(step, rank, ranks)
            assert (of_rank % ranks == rank).all()
            assert len(set(of_rank % bloom_filter.PARTITIONS)) == bloom_filter.PARTITIONS // step
