"""Rows of a dynamic table that go to a file come back as they went, on any number of ranks."""

import os
import resource
import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import StorageOption, StorageType, TableError, TablePolicy, checkpoint
from collective.coordination import barrier
from collective.tables.rows import row_store, rows_in_file
from collective.train import LazyAdamOptimizer
from tests.ranks.dynamic_tables import D, normal

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2)]

OPTIMIZERS = {
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "lazy_adam": lambda: LazyAdamOptimizer(0.01),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
}
KEYS = np.arange(3000, dtype=np.int64) * 2**35 - 7
MEMORY = 4096  # Bytes: some 100 rows with their slots.


def in_file(folder, size=MEMORY, **options):
    return TablePolicy(
        storage="dram_ssd", storage_path=f"{folder}/rows", storage_size=size, **options
    )


def batches(rank, count, size=200):
    rng = np.random.default_rng(rank)
    return [KEYS[rng.zipf(1.2, size) % len(KEYS)] for _ in range(count)]


class Model:
    """Trains table 't' by two lookups of a group."""

    def __init__(self, policy, optimizer="adagrad"):
        tf.set_random_seed(7)
        step = tf.train.get_or_create_global_step()
        self.table = collective.get_embedding_variable(
            "t", D, initializer=normal(), ev_option=policy
        )
        self.ids = tf.placeholder(tf.int64, [None])
        self.rows = tf.nn.embedding_lookup(self.table, self.ids)
        pairs = tf.SparseTensor(
            tf.stack(
                [tf.range(tf.size(self.ids, out_type=tf.int64)) // 2, tf.zeros_like(self.ids)], 1
            ),
            self.ids,
            [tf.size(self.ids, out_type=tf.int64), 2],
        )
        pooled = tf.nn.embedding_lookup_sparse(self.table, pairs, None, combiner="sum")
        self.loss = tf.reduce_sum(self.rows**2) + tf.reduce_sum(tf.abs(pooled - 1))
        self.train = OPTIMIZERS[optimizer]().minimize(self.loss, global_step=step)
        self.saver = tf.train.Saver()

    def steps(self, session, some_batches):
        return [session.run([self.loss, self.train], {self.ids: b})[0] for b in some_batches]

    def store(self, session):
        return self.table.store(session)


def exported(table, session):
    keys, rows = zip(*table.export(session, 100))
    return np.concatenate(keys), np.concatenate(rows)


def stored(path):
    """Returns what a checkpoint has of table and slots, by entry."""
    reader = tf.train.load_checkpoint(path)
    names = reader.get_variable_to_shape_map()
    return {name: reader.get_tensor(name) for name in names if name.startswith("t")}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_with_a_file_equals_one_in_memory(strategy, folder, rank, optimizer):
    """Losses, evaluations, exports and checkpoints are the same, bit for bit."""
    found = []
    for policy in (None, in_file(folder)):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(policy, optimizer)
            path = f"{folder}/{'memory' if policy is None else 'file'}"
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                losses = model.steps(session, batches(rank, 6))
                seen = session.run(model.rows, {model.ids: KEYS[::3]})  # 2/3 of the keys are known
                if policy is not None:
                    store = model.store(session)
                    assert store.file_bytes > 0 and store.count_in_memory < 180 <= len(store)
                losses += model.steps(session, batches(rank + 5, 3))
                model.saver.save(session, path)
                sizes = session.run(collective.embedding_sizes())["t"]
                looked_up = model.table.lookup_keys(session, KEYS[:500])
                found.append((losses, seen, *exported(model.table, session), sizes, *looked_up))
                found[-1] += (model.table.local_count(session), *model.steps(session, [KEYS[:99]]))
            barrier.exchange(None, "written", {})
            found[-1] += (stored(path),)
    for one, other in zip(*found):
        if not isinstance(one, dict):
            np.testing.assert_array_equal(one, other)
            continue
        assert one.keys() == other.keys() and len(one) > 2
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], name)


@pytest.mark.slow
def test_checkpoints_are_restored_into_files_and_memory(strategy, folder, rank):
    """Either way; what a restored table does next is the same, too."""
    found = []
    for saved, restored in ((None, in_file(folder)), (in_file(folder), None)):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(saved)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                model.steps(session, batches(rank, 5))
                model.saver.save(session, f"{folder}/m")
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(restored)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                model.saver.restore(session, f"{folder}/m")
                if restored is not None:
                    store = model.store(session)
                    assert store.count_in_memory < 200 < len(store)
                losses = model.steps(session, batches(rank + 9, 2))
                found.append((losses, *exported(model.table, session)))
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


def test_rows_in_a_file_are_removed_imported_and_cleared(strategy, folder):
    found = []
    for policy in (None, in_file(folder)):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(policy)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                model.steps(session, [KEYS[:900]])
                removed = model.table.remove(session, KEYS[:1000:3])
                model.steps(session, [KEYS[:30]])
                model.table.import_(session, KEYS[20:1500], np.full((1480, D), 0.25))
                model.steps(session, [KEYS[10:40], KEYS[1000:1100]])
                found.append([removed, *exported(model.table, session)])
                found[-1] += [model.table.clear(session), model.table.local_count(session)]
                model.steps(session, [KEYS[:5]])
                found[-1] += exported(model.table, session)
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)
    assert found[0][3] > 600 and found[0][4] == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [{"steps_to_live": 3}, {"l2_weight_threshold": 0.2}], ids=str)
def test_rows_in_a_file_are_evicted(strategy, folder, rank, rule):
    """At saves, by last uses that go to the file with their rows, or by weights there."""
    found = []
    for policy in (TablePolicy(**rule), in_file(folder, **rule)):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(policy)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                model.steps(session, [KEYS[i * 200 : i * 200 + 400] for i in range(5)])
                model.steps(session, batches(rank, 2))
                model.saver.save(session, f"{folder}/m")
                found.append([*exported(model.table, session)])
                model.steps(session, batches(rank, 3))
                model.saver.save(session, f"{folder}/m")
                found[-1] += exported(model.table, session)
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)
    assert 0 < len(found[0][0]) < 1200


@pytest.mark.slow
def test_keys_are_admitted_as_in_memory(strategy, folder, rank):
    """Also by lookups that don't meet: a row that comes back in a run isn't one that it admits."""
    found = []
    for policy in (TablePolicy(filter_freq=3), in_file(folder, 1024, filter_freq=3)):
        with strategy.scope(plan="quiet", grouping=False), tf.Graph().as_default():
            tf.set_random_seed(7)
            table = collective.get_embedding_variable(
                "t", D, initializer=normal(), ev_option=policy
            )
            ids = [tf.placeholder(tf.int64, [None]) for _ in range(2)]
            rows = [tf.nn.embedding_lookup(table, keys) for keys in ids]
            loss = tf.add_n([tf.reduce_sum(x**2) for x in rows])
            train = OPTIMIZERS["adagrad"]().minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                losses = []
                for keys in batches(rank, 12):
                    is_even = (keys + 7) // 2**35 % 2 == 0  # No key is in both lookups.
                    feeds = {ids[0]: keys[is_even], ids[1]: keys[~is_even]}
                    losses.append(session.run([loss, train], feeds)[0])
                counts = table.statistics(session).counts()
                blocks = zip(*table.export(session, 100, frequencies=True))
                found.append((losses, sorted(counts.items()), *map(np.concatenate, blocks)))
                if policy.storage is not None:
                    store = table.store(session)
                    assert store.file_bytes > 0 and store.count_in_memory < len(store)
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


def test_rows_restored_without_last_uses_count_as_used_then(strategy, folder):
    for policy in (None, in_file(folder, steps_to_live=3)):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(policy)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                if policy is None:
                    model.steps(session, [KEYS[:1000]])
                    model.saver.save(session, f"{folder}/m")
                    continue
                model.saver.restore(session, f"{folder}/m")
                for steps, left in ((2, 1000), (1, 2)):
                    model.steps(session, [KEYS[:2]] * steps)
                    model.saver.save(session, f"{folder}/n")
                    keys = [k for k, _ in checkpoint.read_table(f"{folder}/n", "t")]
                    assert sum(map(len, keys)) == left


def test_deeprecs_option_keeps_rows_in_files(strategy, folder, recwarn):
    option = collective.EmbeddingVariableOption(
        storage_option=StorageOption(StorageType.DRAM_SSDHASH, f"{folder}/rows", [MEMORY])
    )
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(option)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, [KEYS[:1000]])
            assert model.store(session).file_bytes > 0
            (table,) = strategy.plan().tables
            assert table.policy["storage"] == "dram_ssd" and table.policy["storage_size"] == MEMORY
    assert not [w for w in recwarn if "no effect" in str(w.message)]
    assert os.listdir(f"{folder}/rows") == []


def test_what_a_table_with_a_file_does_not_go_with(strategy, folder, monkeypatch):
    policy = in_file(folder)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        rows = tf.nn.embedding_lookup(
            collective.get_embedding_variable("t", D, ev_option=policy), tf.constant([1])
        )
        with pytest.raises(TableError, match="AdamOptimizer moves all rows of table 't'.*LazyAdam"):
            tf.train.AdamOptimizer().minimize(tf.reduce_sum(rows))
    with strategy.scope(plan="quiet", local_steps=2), tf.Graph().as_default():
        rows = tf.nn.embedding_lookup(
            collective.get_embedding_variable("t", D, ev_option=policy), tf.constant([1])
        )
        with pytest.raises(TableError, match=r"local_steps=2\) sums gradients.*table 't'"):
            tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows))
    names = {"op": types.SimpleNamespace(name="t"), "policy": policy}
    with pytest.raises(TableError, match="the GPU's memory. Set COLLECTIVE_DYNAMIC_TABLES=host"):
        rows_in_file.prepare(types.SimpleNamespace(bridge=object(), **names))
    monkeypatch.setattr(row_store, "is_compiled", lambda: False)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with pytest.raises(TableError, match="table 't' is to keep rows in a file"):
            collective.get_embedding_variable("t", D, ev_option=policy)


def test_a_full_disk_is_an_error_on_all_ranks(strategy, folder, rank, size):
    """It names table and folder; nothing is lost, and the last checkpoint is restored."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(in_file(folder))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, batches(rank, 5))
            model.saver.save(session, f"{folder}/m")
            keys, rows = exported(model.table, session)
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            words = "dynamic table 't': its file in '.*rows' can not be written"
            if rank == size - 1:
                resource.setrlimit(
                    resource.RLIMIT_FSIZE, (model.store(session).file_bytes, before[1])
                )
            try:
                with pytest.raises(Exception, match=words):  # the last rank's, then all ranks'
                    for _ in range(3):
                        model.steps(session, [KEYS])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            now = dict(zip(*exported(model.table, session)))
            assert now.keys() >= set(keys.tolist())
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(in_file(folder))
        with tf.Session() as session:
            model.saver.restore(session, f"{folder}/m")
            restored_keys, restored_rows = exported(model.table, session)
            np.testing.assert_array_equal(restored_keys, keys)
            np.testing.assert_array_equal(restored_rows, rows)
            model.steps(session, [KEYS[:50]])


def test_evaluation_inserts_nothing_and_memory_stays_limited(strategy, folder):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(in_file(folder))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, [KEYS[:2000]])
            count = model.table.local_count(session)
            for first in range(0, 3000, 500):
                part = KEYS[first : first + 500]
                session.run(model.rows, {model.ids: part})
                assert model.store(session).count_in_memory < 180
            unknown = session.run(model.rows, {model.ids: KEYS[2500:2600]})
            np.testing.assert_array_equal(unknown, np.zeros_like(unknown))
            assert model.table.local_count(session) == count
