"""Ranks that train by Keras notice that they have other orders of records, or all of them."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf2

from collective.coordination.dealt_input import EAGER_INPUT
from collective.errors import RankError
from tests.ranks import grouped
from tests.ranks.keras.models import BATCH, data, keras, make_model, part, train_step

new = keras.optimizers


def records(order):
    (users, words), labels = data()
    return tf2.data.Dataset.from_tensor_slices(((users[order], words[order]), labels[order]))


def generated(order):
    users, words = (x[order] for x in data()[0])

    def generate():
        yield from zip(users, words)

    signature = (tf2.TensorSpec([], tf2.int64), tf2.TensorSpec([3], tf2.int64))
    made = tf2.data.Dataset.from_generator(generate, output_signature=signature)
    return made.map(lambda user, words: ((user, words), 0.5))


def fit(strategy, dataset, size):
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        model.compile(new.SGD(0.1), "mse")
        model.fit(strategy.shard(dataset).batch(BATCH // size), verbose=0)
    return model


def loop(strategy, dataset, size):
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        step = train_step(model, new.SGD(0.1))
        for (users, words), labels in strategy.shard(dataset).batch(BATCH // size):
            step(users, words, labels)
    return model


@pytest.mark.parametrize("made", [records, generated])
@pytest.mark.parametrize("train", [fit, loop])
def test_an_order_of_each_rank_s_own_is_refused(strategy, rank, size, train, made):
    count = len(data()[1])
    order = np.random.default_rng(rank).permutation(count)  # as of a split without a seed
    if size == 1:
        train(strategy, made(order), size)
        return
    with pytest.raises(RankError, match="the dataset is not the same on all ranks"):
        train(strategy, made(order), size)
    train(strategy, made(np.random.default_rng(7).permutation(count)), size)


def test_batches_that_are_dealt_have_a_known_number(strategy, size):
    """They are followed as they come, by an operation that has no length of its own."""
    with strategy.scope():
        dealt = strategy.shard(records(np.arange(7 * size)).batch(1))
        assert dealt.cardinality() == 7 == len(list(dealt))
        endless = strategy.shard(records(np.arange(7)).batch(1).repeat())
        assert endless.cardinality() == tf2.data.INFINITE_CARDINALITY


def test_samples_of_datasets_need_a_seed(strategy, size):
    with strategy.scope():
        parts = [records(np.arange(10)), records(np.arange(10, 20))]
        sampled = tf2.data.Dataset.sample_from_datasets(parts)
        if size > 1:
            with pytest.raises(ValueError, match="sample_from_datasets"):
                strategy.shard(sampled)
        strategy.shard(tf2.data.Dataset.sample_from_datasets(parts, seed=1))


def warned(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    texts = [str(w.message).partition(":")[0] for w in caught]
    own = [text for text in texts if text.startswith("every rank")]
    return grouped.everyone(own)[0]  # of rank 0, which speaks for all


def test_all_records_on_every_rank_are_warned_of(strategy, rank, size):
    x, y = data()
    whole = tf2.data.Dataset.from_tensor_slices((x, y))
    shuffled = whole.shuffle(50, seed=3).map(lambda x, y: (x, y + 1.0)).batch(8).prefetch(1)
    trains = ["every rank trains on the same records"] * (size > 1)
    evaluates = ["every rank evaluates the same records"] * (size > 1)
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        model.compile(new.SGD(0.1), "mse")
        assert warned(lambda: model.fit(x, y, verbose=0)) == trains
        assert warned(lambda: model.fit(shuffled, verbose=0)) == trains
        assert warned(lambda: model.evaluate(x, y, verbose=0)) == evaluates
        assert warned(lambda: model.predict(whole.batch(8), verbose=0)) == []
        own_x, own_y = part((x, y), rank, size)
        assert warned(lambda: model.fit(own_x, own_y, verbose=0)) == []
        assert warned(lambda: model.evaluate(own_x, own_y, verbose=0)) == []
        dealt = strategy.shard(whole).batch(BATCH // size)
        assert warned(lambda: model.fit(dealt, verbose=0)) == []


def test_records_that_a_rank_finds_by_itself_are_its_own(strategy, rank, size):
    (users, words), labels = (tf2.nest.map_structure(tf2.constant, each) for each in data())
    places = tf2.data.Dataset.range(len(labels) // size).batch(BATCH // size)

    def own(numbers):
        numbers = numbers * size + rank
        chosen = [tf2.gather(x, numbers) for x in (users, words, labels)]
        return tuple(chosen[:2]), chosen[2]

    in_arrays = tf2.data.Dataset.from_tensor_slices(np.arange(len(labels) // size))
    filtered = records(np.arange(len(labels))).enumerate().filter(lambda i, _: i % size == rank)
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        model.compile(new.SGD(0.1), "mse")
        for dataset in (
            places.map(own),
            in_arrays.batch(BATCH // size).map(own),
            filtered.map(lambda _, record: record).batch(BATCH // size),
        ):
            assert warned(functools.partial(model.fit, dataset, verbose=0)) == []


def test_a_comparison_that_fails_on_one_rank_fails_on_all(strategy, rank, size, monkeypatch):
    def report(session):
        if rank == size - 1:
            raise OSError("broken on purpose")

    monkeypatch.setattr(EAGER_INPUT, "dealt", SimpleNamespace(report=report))
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        model.compile(new.SGD(0.1), "mse")
        if size > 1:
            kind = OSError if rank == size - 1 else RankError
            with pytest.raises(kind, match="broken on purpose"):
                model.fit(*part(data(), rank, size), verbose=0)
        assert grouped.everyone(rank) == list(range(size))  # nobody waits for the one that failed
