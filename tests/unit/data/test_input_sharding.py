"""strategy.shard(dataset): every element is used by one rank, and by no other, for any N."""

from __future__ import annotations

import warnings

import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.data import dataset_analysis
from collective.estimator import input_sharding
from collective.ops.communication import collectives

SIZES = range(1, 6)


def parts(monkeypatch, ranks, make):
    """Returns the elements that each rank gets of the dataset that `make` makes."""
    monkeypatch.setattr(collectives, "size", lambda: ranks)
    out = []
    for rank in range(ranks):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        with tf.Graph().as_default():
            element = tf.data.make_one_shot_iterator(input_sharding.shard(make())).get_next()
            elements = []
            with tf.Session() as session:
                while True:
                    try:
                        elements.append(session.run(element).tolist())
                    except tf.errors.OutOfRangeError:
                        break
        out.append(elements)
    return out


@pytest.mark.parametrize("ranks", SIZES)
def test_records_are_dealt(monkeypatch, ranks):
    got = parts(monkeypatch, ranks, lambda: tf.data.Dataset.range(11))
    assert got == [list(range(11))[rank::ranks] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", SIZES)
def test_batches_go_to_a_rank_whole(monkeypatch, ranks):
    got = parts(monkeypatch, ranks, lambda: tf.data.Dataset.range(11).batch(2))
    batches = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    assert got == [batches[rank::ranks] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", SIZES)
def test_every_record_is_used_once_after_operations_that_may_reorder_it(monkeypatch, ranks):
    """Shuffled alike by a seed; read by several threads in no order of its own."""

    def make():
        options = tf.data.Options()
        options.deterministic = False
        return (
            tf.data.Dataset.range(40)
            .with_options(options)
            .map(lambda x: x + 1, num_parallel_calls=4)
            .shuffle(40, seed=3)
        )

    got = parts(monkeypatch, ranks, make)
    assert sorted(x for part in got for x in part) == list(range(1, 41))
    assert max(map(len, got)) - min(map(len, got)) <= 1


def test_a_shuffle_that_differs_between_ranks_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    (tmp_path / "a").touch()
    with tf.Graph().as_default():
        for dataset in (
            tf.data.Dataset.range(5).shuffle(5),
            tf.data.Dataset.range(5).shuffle(5).batch(2).repeat(),
            tf.data.Dataset.list_files(str(tmp_path / "*")),
        ):
            with pytest.raises(ValueError, match=r"without a seed.*strategy\.shard\(dataset\)\.s"):
                input_sharding.shard(dataset)
        input_sharding.shard(tf.data.Dataset.range(5)).shuffle(5)
        input_sharding.shard(tf.data.Dataset.list_files(str(tmp_path / "*"), shuffle=False))
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        input_sharding.shard(tf.data.Dataset.range(5).shuffle(5))


def test_a_dataset_is_sharded_once(monkeypatch):
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 0)
    with tf.Graph().as_default():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sharded = input_sharding.shard(tf.data.Dataset.range(5)).batch(2)
        with pytest.warns(UserWarning, match="already uses shard.*Shard it once"):
            input_sharding.shard(sharded)


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_datasets_are_sharded(monkeypatch, ranks):
    monkeypatch.setattr(collectives, "size", lambda: ranks)
    with pytest.raises(TypeError, match="takes a tf.data.Dataset, not list"):
        input_sharding.shard([1, 2])


def test_one_rank_has_the_dataset_itself(monkeypatch):
    monkeypatch.setattr(collectives, "size", lambda: 1)
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.range(5).shuffle(5)
        assert input_sharding.shard(dataset) is dataset


@pytest.fixture
def eagerly(monkeypatch):
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    with tf.init_scope():
        if not tf.executing_eagerly():
            pytest.skip("eager execution is off in this process")
        yield


MODULES = [tf.data.Dataset, tf2.data.Dataset]


@pytest.mark.parametrize("module", MODULES)
def test_datasets_that_are_made_eagerly(eagerly, module):
    got = list(input_sharding.shard(module.range(5)).as_numpy_iterator())
    assert got == [1, 3]


@pytest.mark.parametrize("module", MODULES)
def test_an_eager_shuffle_that_differs_between_ranks_is_refused(eagerly, module, tmp_path):
    """There is no graph whose operations could be read, and yet no record may be lost."""
    (tmp_path / "a").touch()
    records = module.range(8)
    for dataset in (
        records.shuffle(8),
        records.shuffle(8).batch(2).repeat().prefetch(1),
        module.zip((records, records.shuffle(8))),
        module.list_files(str(tmp_path / "*")),
    ):
        with pytest.raises(ValueError, match=r"without a seed.*strategy\.shard\(dataset\)\.s"):
            input_sharding.shard(dataset)
    input_sharding.shard(records).shuffle(8)
    input_sharding.shard(records.shuffle(8, seed=3))
    input_sharding.shard(module.list_files(str(tmp_path / "*"), shuffle=False))


@pytest.mark.parametrize("module", MODULES)
def test_the_other_mistakes_are_found_eagerly_too(eagerly, module):
    with pytest.raises(ValueError, match=r"\(ParallelMapDataset\).*deterministic=False"):
        input_sharding.shard(UNORDERED["map"](module.range(5)))
    with pytest.warns(UserWarning, match="already uses shard"):
        input_sharding.shard(input_sharding.shard(module.range(5)).batch(2))


def slowly(x):
    return x + 1


UNORDERED = {
    "map": lambda data: data.map(slowly, num_parallel_calls=4, deterministic=False).batch(2),
    "interleave": lambda data: data.interleave(
        lambda x: tf.data.Dataset.range(x),
        cycle_length=2,
        num_parallel_calls=2,
        deterministic=False,
    ),
    "sloppy": lambda data: data.apply(
        tf.data.experimental.parallel_interleave(
            lambda x: tf.data.Dataset.range(x), cycle_length=2, sloppy=True
        )
    ),
}
ORDERED = {
    "by default": lambda data: data.map(slowly, num_parallel_calls=4),
    "as told": lambda data: data.map(slowly, num_parallel_calls=4, deterministic=True),
    "one by one": lambda data: data.map(slowly),
}


@pytest.mark.parametrize("make", UNORDERED.values(), ids=UNORDERED)
def test_an_order_that_differs_between_ranks_is_refused(monkeypatch, make):
    """The options of a dataset don't override what an operation is told."""
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match=r"deterministic=False.*strategy\.shard\(dataset\)\."):
            input_sharding.shard(make(tf.data.Dataset.range(5)))
        with pytest.raises(ValueError, match="deterministic=False.*argument input_context"):
            input_sharding.deal(make(tf.data.Dataset.range(5)))
        make(input_sharding.shard(tf.data.Dataset.range(5)))
        with monkeypatch.context() as patch:
            patch.setattr(dataset_analysis.config, "is_op_determinism_enabled", lambda: True)
            input_sharding.shard(make(tf.data.Dataset.range(5)))


@pytest.mark.parametrize("make", ORDERED.values(), ids=ORDERED)
def test_an_order_that_all_ranks_have_is_not(monkeypatch, make):
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    with tf.Graph().as_default():
        input_sharding.shard(make(tf.data.Dataset.range(5)))
        input_sharding.deal(make(tf.data.Dataset.range(5)))


def test_the_parts_of_a_zip_are_sharded(monkeypatch):
    """Which is the way out where one of them is shuffled."""
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    with tf.Graph().as_default():
        records, negatives = tf.data.Dataset.range(8), tf.data.Dataset.range(8)
        with pytest.raises(ValueError, match=r"part of a zip\(\).*shard the parts first, then zip"):
            input_sharding.shard(tf.data.Dataset.zip((records, negatives.shuffle(8))))
        shard = input_sharding.shard
        tf.data.Dataset.zip((shard(records), shard(negatives).shuffle(8)))
