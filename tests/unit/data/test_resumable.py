"""Global batches have the same records at any N, and what can't be counted is refused."""

from __future__ import annotations

import hypothesis
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from hypothesis import strategies as some

from collective import data
from collective.data.global_batches import GlobalBatches, PartOrder
from collective.data.record_order import RecordOrder
from collective.ops.communication import collectives

REPEATABLE = hypothesis.settings(max_examples=300, derandomize=True, deadline=None, database=None)


@pytest.fixture
def as_rank(monkeypatch):
    """Returns a function that makes this process rank r of N."""

    def be(rank, ranks):
        monkeypatch.setattr(collectives, "rank", lambda: rank)
        monkeypatch.setattr(collectives, "size", lambda: ranks)

    return be


def read(make):
    """Returns the batches of the dataset that `make` makes."""
    with tf.Graph().as_default():
        iterator = tf.data.make_one_shot_iterator(make())
        element = iterator.get_next()
        batches = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            while True:
                try:
                    batches.append(session.run(element).tolist())
                except tf.errors.OutOfRangeError:
                    return batches


@pytest.mark.slow
@REPEATABLE
@hypothesis.given(
    records=some.integers(1, 20),
    epochs=some.integers(1, 4),
    batch_size=some.integers(5, 11),
    ranks=some.integers(1, 5),
    drop_remainder=some.booleans(),
    seed=some.integers(0, 9),
)
def test_parts_are_together_the_batches_of_one_rank(
    records, epochs, batch_size, ranks, drop_remainder, seed
):
    def parts(rank, ranks):
        batches = GlobalBatches(records, epochs, batch_size, drop_remainder, rank, ranks)
        return [batches.part(number) for number in range(batches.end)]

    def listed(part):
        return [(epoch, i) for epoch, first, last in part for i in range(first, last)]

    whole = [listed(part) for part in parts(0, 1)]
    everything = [(epoch, i) for epoch in range(epochs) for i in range(records)]
    used = records * epochs // batch_size * batch_size if drop_remainder else records * epochs
    assert sum(whole, []) == everything[:used]
    of_ranks = [[listed(part) for part in parts(rank, ranks)] for rank in range(ranks)]
    for number, batch in enumerate(whole):
        assert sum((part[number] for part in of_ranks if number < len(part)), []) == batch
    assert all(part for of_rank in of_ranks for part in of_rank)
    # The pieces of row groups are those of an epoch's order, whatever the batches are.
    order = RecordOrder([3] * (records // 3) + [records % 3], 2, shuffle=True, seed=seed)
    long = RecordOrder([3] * (records // 3) + [records % 3], records, shuffle=True, seed=seed)
    got = [
        record
        for number in range(len(whole))
        for rank in range(ranks)
        if number < len(of_ranks[rank])
        for record in _records(
            PartOrder(
                order, GlobalBatches(records, epochs, batch_size, drop_remainder, rank, ranks)
            ).batch(number),
            order,
        )
    ]
    want = [record for epoch in range(epochs) for record in _records(long.batch(epoch), long)]
    assert got == want[:used]


def _records(batch, order):
    return [
        (piece.group, int(row))
        for piece in batch.pieces
        for row in order.permutation(piece.epoch, piece.group)[
            piece.first : piece.first + piece.count
        ]
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [4, 6])
def test_any_pipeline_is_dealt_by_global_batches(as_rank, ranks, batch_size):
    def records():
        return tf2.data.Dataset.range(21).shuffle(8, seed=1).repeat(2)

    def batches(**options):
        return read(lambda: data.resumable(records(), batch_size, **options).prefetch(2))

    as_rank(0, 1)
    order = sum(batches(), [])
    assert sorted(order) == sorted([*range(21)] * 2)
    for rank in range(ranks):
        as_rank(rank, ranks)
        want = [order[i : i + batch_size][rank::ranks] for i in range(0, 42, batch_size)]
        assert batches() == [part for part in want if part]


def test_batches_are_made_as_asked(as_rank):
    as_rank(1, 2)

    def make():
        lists = tf2.data.Dataset.range(8).map(lambda i: tf.fill([i % 3], i))
        return data.resumable(lists, 4, batch=lambda records, n: records.padded_batch(n, [None]))

    assert read(make) == [[[1], [0]], [[5, 5], [7, 0]]]


@pytest.mark.slow
def test_parquet_is_dealt_by_global_batches(as_rank, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": np.arange(23)}), path, row_group_size=5)

    def batches(rank, ranks, **options):
        as_rank(rank, ranks)
        return read(
            lambda: data.resumable(
                data.parquet(str(path), shuffle=True, seed=2, epochs=2), 8, **options
            ).map(lambda batch: batch["id"])
        )

    whole = batches(0, 1)
    assert [len(batch) for batch in whole] == [8, 8, 8, 8, 8, 6]
    order = sum(whole, [])
    assert sorted(order[:23]) == sorted(order[23:]) == list(range(23)) and order[:23] != order[23:]
    for ranks in (2, 3, 4):
        parts = [batches(rank, ranks) for rank in range(ranks)]
        assert [sum(step, []) for step in zip(*parts)] == whole
    assert batches(0, 1, drop_remainder=True) == whole[:5]


def test_what_differs_between_ranks_or_is_dealt_is_refused(tmp_path):
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"id": np.arange(4)}), path)
    with tf.Graph().as_default():
        records = tf2.data.Dataset.range(8)
        for dataset, message in (
            (records.shuffle(4), "shuffled without a seed"),
            (records.shard(2, 0), "the dataset uses shard"),
            (records.map(lambda i: i, 2, deterministic=False), "deterministic=False"),
            (data.parquet(path).map(lambda batch: batch), "that of parquet"),
            (data.parquet(path, start=1), "that of parquet"),
            (data.resumable(records, 2, name="one").prefetch(1), "another resumable"),
        ):
            with pytest.raises(ValueError, match=message):
                data.resumable(dataset, 2, name="other")
        with pytest.raises(TypeError, match="takes a tf.data.Dataset, not list"):
            data.resumable([1, 2], 2)
        for size in (0, -1, True, 2.0, None):
            with pytest.raises(ValueError, match="batch_size="):
                data.resumable(records, size)
        for name in ("held out", "", 3, "/x"):
            with pytest.raises(ValueError, match="it begins the names of variables"):
                data.resumable(records, 2, name=name)
        with pytest.raises(ValueError, match="start=-1"):
            data.resumable(records, 2, start=-1)
        with pytest.raises(ValueError, match="on_change='ignore'"):
            data.resumable(records, 2, on_change="ignore")
        with pytest.raises(ValueError, match="makes its batches itself"):
            data.resumable(data.parquet(path), 2, batch=lambda records, n: records.batch(n))
        data.resumable(records, 2)
        with pytest.raises(ValueError, match="the graph has a resumable dataset of this name"):
            data.resumable(records, 2)
    with pytest.raises(RuntimeError, match=r"resumable\(\) is called"):
        data.resumable(tf2.data.Dataset.range(3), 2)
    assert read(lambda: data.resumable(tf2.data.Dataset.range(3), 2)) == [[0, 1], [2]]


def test_fewer_records_than_ranks_are_refused(as_rank):
    as_rank(0, 3)
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="at least one record for each rank, and there are 3"),
    ):
        data.resumable(tf2.data.Dataset.range(8), 2)


def counted(strategy, make_fetch):
    """Runs what `make_fetch` makes of a resumable dataset, and returns the position then."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        fetch = make_fetch(data.resumable(tf2.data.Dataset.range(40), 2))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(3):
                session.run(fetch)
            (place,) = [v for v in tf.global_variables() if v.op.name == "data/position"]
            return session.run(place)


@pytest.fixture(scope="module")
def strategy():
    from collective import CollectiveStrategy

    return CollectiveStrategy()


def from_structure(dataset, other):
    iterator = tf.data.Iterator.from_structure(
        tf.data.get_output_types(dataset), tf.data.get_output_shapes(dataset)
    )
    starts = [iterator.make_initializer(each) for each in (dataset, other)]
    assert len(starts) == 2
    return iterator.get_next()


def test_a_run_counts_each_batch_that_it_takes(strategy):
    make = tf.data.make_one_shot_iterator
    assert counted(strategy, lambda d: make(d).get_next()) == 3
    assert counted(strategy, lambda d: make(d.map(lambda x: x).prefetch(4).take(9)).get_next()) == 3
    with_numbers = lambda d: tf2.data.Dataset.zip((d, tf2.data.Dataset.range(99)))  # noqa: E731
    assert counted(strategy, lambda d: make(with_numbers(d)).get_next()) == 3

    def twice(dataset):
        iterator = make(dataset)
        return iterator.get_next(), iterator.get_next()

    assert counted(strategy, twice) == 6
    assert counted(strategy, lambda d: make(tf2.data.Dataset.range(9)).get_next()) == 0


@pytest.mark.parametrize(
    "after", ["shuffle", "repeat", "batch", "unbatch", "filter", "skip", "cache", "flat_map"]
)
def test_datasets_that_do_not_give_one_for_each_are_refused(strategy, after):
    make = {
        "shuffle": lambda d: d.shuffle(3, seed=1),
        "repeat": lambda d: d.repeat(2),
        "batch": lambda d: d.batch(2),
        "unbatch": lambda d: d.unbatch(),
        "filter": lambda d: d.filter(lambda x: x[0] > 3),
        "skip": lambda d: d.skip(1),
        "cache": lambda d: d.cache(),
        "flat_map": lambda d: d.flat_map(tf2.data.Dataset.from_tensors),
    }[after]
    with pytest.raises(NotImplementedError, match="pass through .* in front of"):
        counted(strategy, lambda d: tf.data.make_one_shot_iterator(make(d)).get_next())


def test_iterators_whose_batches_are_not_known_are_refused(strategy):
    make = tf.data.make_one_shot_iterator

    def by_handle(dataset):
        handle = make(dataset).string_handle()
        types, shapes = tf.data.get_output_types(dataset), tf.data.get_output_shapes(dataset)
        return tf.data.Iterator.from_string_handle(handle, types, shapes).get_next()

    def in_a_branch(dataset):
        iterator = make(dataset)
        return tf.cond(tf.constant(True), iterator.get_next, lambda: tf.constant([1, 2], tf.int64))

    def of_two(dataset):
        return from_structure(dataset, tf2.data.Dataset.range(4).batch(2))

    for fetch, message in (
        (by_handle, "by a string handle"),
        (in_a_branch, "in a branch, a loop"),
        (of_two, "is given several datasets"),
        (lambda d: make(d).get_next_as_optional().has_value(), "as an optional"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            counted(strategy, fetch)
