"""How often keys came is saved, restored at any N and under another policy, and goes with rows."""

import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import TablePolicy, checkpoint
from collective.checkpoint.files.tensor_bundle import Bundle
from collective.checkpoint.rows import key_counts
from collective.checkpoint.rows.shards import Shard
from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.tables.policies import admission
from tests.ranks.admitted_keys import KEYS, Bloom, Exact, Model, Truth, batches, compare
from tests.ranks.dynamic_tables import D

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

BLOOM = {"max_element_size": 1000, "false_positive_probability": 0.01}
COUNT, OFTEN = TablePolicy(filter_freq=3), TablePolicy(filter_freq=5)
POLICIES = {
    "count": COUNT,
    "often": OFTEN,
    "bloom": dataclasses.replace(COUNT, **BLOOM),
    "often bloom": dataclasses.replace(OFTEN, counter_type="uint64", **BLOOM),
    "small bloom": dataclasses.replace(OFTEN, max_element_size=3, false_positive_probability=0.2),
    "none": TablePolicy(),
    "chance": TablePolicy(admit_probability=0.4),
    "old": dataclasses.replace(COUNT, steps_to_live=2),
}


def frequencies(path):
    return {
        int(key): int(count)
        for keys, rows, counts in checkpoint.read_table(path, "t", frequencies=True)
        for key, row, count in zip(keys, rows, counts)
    }


def refused(path):
    """Returns how often keys without rows came, in a checkpoint."""
    return {
        int(key): int(count[0])
        for keys, counts in checkpoint.read_table(path, "t/refused")
        for key, count in zip(keys, counts)
    }


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("second", POLICIES)
@pytest.mark.parametrize("first", ["count", "bloom", "none", "chance"])
def test_a_checkpoint_is_restored_under_another_policy(strategy, folder, first, second):
    truth = Truth(POLICIES[first])

    def run(name, restored, saved, *given):
        truth.policy = POLICIES[name]
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(strategy, POLICIES[name])
            with tf.Session() as session:
                if restored:
                    model.saver.restore(session, restored)
                else:
                    session.run(tf.global_variables_initializer())
                compare(model, session, truth)
                for keys in given:
                    model.steps(session, keys)
                    truth.train(keys)
                    compare(model, session, truth)
                if POLICIES[name].counts_keys:
                    for keys, rows, counts in model.table.export(session, frequencies=True):
                        assert rows.shape == (len(keys), D)
                        want = [truth.frequencies[int(key)] for key in keys]
                        np.testing.assert_array_equal(counts, want)
                else:
                    with pytest.raises(ValueError, match="'t' doesn't count its keys"):
                        next(model.table.export(session, frequencies=True))
                model.saver.save(session, saved)

    before, after = batches(4), batches(4, seed=5)
    run(first, None, f"{folder}/a", *before)
    if first == "count":
        assert frequencies(f"{folder}/a") == dict(truth.frequencies)
        assert refused(f"{folder}/a") == dict(truth.counts.of)
    elif not POLICIES[first].counts_keys:
        with pytest.raises(ValueError, match="no frequencies of 't'"):
            checkpoint.read_table(f"{folder}/a", "t", frequencies=True)
    kept = POLICIES[first].counts_keys and (
        first == "count" or second in ("bloom", "often bloom") or not POLICIES[second].counts_keys
    )
    if not kept or not POLICIES[second].counts_keys:
        truth.counts = Exact()
    if not POLICIES[second].counts_keys or not POLICIES[first].counts_keys:
        truth.frequencies.clear()
    if "old" in second:
        after = [np.concatenate([KEYS, batch]) for batch in after]  # nothing is evicted
    run(second, f"{folder}/a", f"{folder}/b", *after)


def test_a_filter_that_takes_more_than_exact_counts_is_not_made(strategy, folder):
    """DeepRec's examples ask for one of 82 GB for each table, which no checkpoint could hold."""
    truth = Truth(COUNT)
    large = {"max_element_size": 2**30, "false_positive_probability": 0.01}
    policy = dataclasses.replace(COUNT, counter_type="int64", **large)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, policy)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for keys in batches(4):
                model.steps(session, keys)
                truth.train(keys)
                compare(model, session, truth)
            model.saver.save(session, f"{folder}/a")
    assert refused(f"{folder}/a") == dict(truth.counts.of)
    # What takes less is made: of smaller counters, or below a GiB.
    for smaller in ({"counter_type": "uint8"}, {"max_element_size": 10**7}):
        assert admission.filter_of(dataclasses.replace(policy, **smaller), 1) is not None


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["count", "bloom"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 11])
def test_counts_are_read_on_any_number_of_ranks(strategy, folder, name, ranks, monkeypatch):
    """Each rank has those of its keys; a filter may know a key better, never less."""
    counts = np.arange(1, len(KEYS) + 1)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, dataclasses.replace(POLICIES[name], filter_freq=1000))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, np.repeat(KEYS, counts))
            model.saver.save(session, f"{folder}/m")
    table, whole, own = model.table, Bloom(1000, 0.01, 2**62), model.rank
    for key, count in zip(KEYS, counts):
        whole.add(int(key), count)
    with monkeypatch.context() as patched:
        patched.setattr(collectives, "size", lambda: ranks)
        for rank in range(own, ranks, model.size):
            patched.setattr(collectives, "rank", lambda rank=rank: rank)
            shape = table.admission.filter = admission.filter_of(table.policy, ranks)
            store = table.new_store()
            shard = Shard("t", table, table, None)
            key_counts.read(Bundle(f"{folder}/m"), shard, "t", store)
            mine = table._is_owned(KEYS)
            if name == "count":
                keys, found = store.keys.counts()
                assert dict(zip(keys, found)) == dict(zip(KEYS[mine], counts[mine]))
                continue
            cells = store.keys.cells()
            for key, count in zip(KEYS[mine], counts[mine]):
                places = whole.places(int(key))
                least = min(cells[part // shape.step, place] for part, place in places)
                assert count <= least <= whole[int(key)]
    barrier.exchange(None, "read", {})  # The folder goes after it.


def test_counts_go_with_their_keys(strategy, folder):
    """A key that was evicted, removed or imported counts from 0 when it comes back."""
    policy = dataclasses.replace(COUNT, steps_to_live=2)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, policy)
        with tf.Session() as session:

            def rows():
                return session.run(model.total)

            session.run(tf.global_variables_initializer())
            model.steps(session, np.repeat(KEYS[:4], [3, 3, 2, 2]))
            assert rows() == 2
            model.steps(session, KEYS[:1], KEYS[:1])
            model.saver.save(session, f"{folder}/m")
            assert rows() == 1 and frequencies(f"{folder}/m") == {int(KEYS[0]): 5}
            model.steps(session, np.repeat(KEYS[1:2], 2))  # it was evicted
            assert rows() == 1
            model.steps(session, KEYS[1:3])  # the second keeps its count: it had no row
            assert rows() == 3
            model.table.remove(session, KEYS[:4])
            assert rows() == 0
            model.steps(session, np.repeat(KEYS[:4], 2))
            assert rows() == 0
            model.table.import_(session, KEYS[:1], np.ones((1, D)))
            model.table.remove(session, KEYS[:1])
            model.steps(session, KEYS[:4])
            assert rows() == 3
            model.table.clear(session)
            model.steps(session, np.repeat(KEYS, 2))
            assert rows() == 0
            model.steps(session, KEYS)
            assert rows() == len(KEYS)


def test_a_bloom_filter_forgets_nothing_but_all(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, POLICIES["bloom"])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, np.repeat(KEYS[:2], 3))
            model.table.remove(session, KEYS[:1])
            model.steps(session, KEYS[:1])
            assert session.run(model.total) == 2
            model.table.clear(session)
            model.steps(session, KEYS[:1])
            assert session.run(model.total) == 0
