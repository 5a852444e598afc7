"""A dynamic table is made, exported, imported, loaded and freed; it refuses to be one value."""

import gc

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import DynamicTable
from collective.ops import placement
from collective.tables.rows import row_store
from tests.ranks.dynamic_tables import EXTREME, D, normal, touch

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3), pytest.mark.double("matrix")]


def test_rows_are_exported_ascending_and_imported_by_their_owners(strategy, rank, size):
    rng = np.random.default_rng(3)
    keys = np.unique(np.concatenate([rng.integers(-(2**63), 2**63 - 1, 300), EXTREME]))
    shuffled = rng.permutation(keys)
    values = rng.normal(size=(len(keys), D)).astype(np.float32)
    with strategy.scope(), tf.Graph().as_default():
        t = collective.get_embedding_variable("t", D)
        p = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(t, p)
        train = tf.train.AdagradOptimizer(0.1, initial_accumulator_value=0.5).minimize(
            tf.reduce_sum(rows)
        )
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(train, {p: keys[:10]})
            for first in range(0, len(keys), 100):
                t.import_(session, shuffled[first : first + 100], values[first : first + 100])
            t.import_(session, shuffled[:3], values[:3] + 1)
            values[:3] += 1
            np.testing.assert_array_equal(session.run(rows, {p: shuffled}), values)
            blocks = list(t.export(session, block=7))
            assert all(len(k) == len(r) <= 7 for k, r in blocks)
            mine = np.concatenate([k for k, _ in blocks] or [np.empty(0, np.int64)])
            np.testing.assert_array_equal(mine, keys[placement.dynamic(size).owner(keys) == rank])
            by_key = dict(zip(shuffled.tolist(), values))
            for k, r in blocks:
                np.testing.assert_array_equal(r, np.stack([by_key[int(key)] for key in k]))
            # a slot that was there is kept, a new one starts fresh
            session.run(train, {p: keys[8:12]})
            accumulated = np.array([2.5, 2.5, 1.5, 1.5], np.float32)[:, None]
            want = np.stack([by_key[int(k)] for k in keys[8:12]]) - 0.1 / np.sqrt(accumulated)
            np.testing.assert_allclose(
                session.run(rows, {p: keys[8:12]}), want, rtol=1e-5, atol=1e-6
            )


def test_many_keys_ascend_through_several_ranges(strategy, monkeypatch):
    monkeypatch.setattr(row_store, "SORTED_AT_ONCE", 50)
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 1000)
    held = row_store.host_store(
        5000, 2, np.float32, "t", lambda rows, dim: np.zeros((len(rows), dim))
    )
    held.rows(keys, True)
    found = list(held.ascending(64))
    assert all(len(k) <= 64 for k, _ in found)
    np.testing.assert_array_equal(np.concatenate([k for k, _ in found]), np.sort(keys))
    np.testing.assert_array_equal(
        held.rows(np.sort(keys), False), np.concatenate([r for _, r in found])
    )


@pytest.mark.slow
def test_what_was_read_replaces_all_at_once(strategy, rank, size):
    """The way of a checkpoint: rows and one slot are given, the other slot starts fresh; the old
    rows are gone.
    """
    keys = np.array([5, -7, 11, 2**50], np.int64)
    rows, accumulators = np.ones((4, D), np.float32) * 3, np.ones((4, D), np.float32) * 4
    with strategy.scope(), tf.Graph().as_default():
        t = collective.get_embedding_variable("t", D, initializer=normal())
        p = tf.placeholder(tf.int64, [None])
        found = tf.nn.embedding_lookup(t, p)
        loss = tf.reduce_sum(found)
        adagrad, momentum = tf.train.AdagradOptimizer(1.0), tf.train.MomentumOptimizer(1.0, 0.5)
        trains = [adagrad.minimize(loss), momentum.minimize(loss)]
        slot = adagrad.get_slot(t, "accumulator")
        total = t.total_count()
        tf.get_default_graph().finalize()
        for start in (False, True):
            with tf.Session() as session:
                if start:
                    session.run([v.initializer for v in tf.global_variables()])
                    session.run(trains[1], {p: [5, 6, 7]})
                loading, mine = t.loading([slot]), placement.dynamic(size).owner(keys) == rank
                for block in (slice(0, 3), slice(3, None)):
                    own = mine[block]
                    loading.add(
                        keys[block][own], rows[block][own], {slot.op.name: accumulators[block][own]}
                    )
                loading.assign(session)
                del loading
                assert session.run(total) == 4
                np.testing.assert_array_equal(
                    session.run(found, {p: [6, *keys]}), [[0] * D] + [[3] * D] * 4
                )
                session.run(trains[0], {p: keys})
                np.testing.assert_allclose(
                    session.run(found, {p: keys}), 3 - 1 / np.sqrt(5), rtol=1e-6
                )
                session.run(trains[1], {p: keys})
                np.testing.assert_allclose(
                    session.run(found, {p: keys}), 2 - 1 / np.sqrt(5), rtol=1e-6
                )
                t.initialize_slot_rows(session, [slot])
                assert t.local_count(session) == (placement.dynamic(size).owner(keys) == rank).sum()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "way",
    [
        lambda t: tf.convert_to_tensor(t),
        lambda t: tf.matmul(t, tf.ones([3, 1])),
        lambda t: tf.nn.l2_loss(t),
        lambda t: t + 1.0,
        lambda t: t[0],
        lambda t: t.value(),
        lambda t: t.assign(tf.ones([10, 3])),
        lambda t: tf.identity(t),
        lambda t: tf.scatter_update(t, [0], tf.ones([1, 3])),
        lambda t: tf.gather_nd(t, [[0, 1]]),
        lambda t: t.eval(),
        lambda t: tf.get_default_session().run(t),
        lambda t: tf.train.ExponentialMovingAverage(0.9).apply([t]),
    ],
)
def test_what_would_need_all_rows_is_refused(strategy, way):
    with strategy.scope(), tf.Graph().as_default():
        t = tf.get_variable("t", [None, 3])
        # a TableError is one
        with tf.Session(), pytest.raises(TypeError, match="table 't' .*export"):
            way(t)


def test_what_makes_a_dynamic_table(strategy):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            a = tf.get_variable("a", [None, 3], partitioner=tf.fixed_size_partitioner(2))
        with tf.variable_scope("s", initializer=tf.ones_initializer(), reuse=tf.AUTO_REUSE):
            b = collective.get_embedding_variable("b", 4, trainable=False, collections=["mine"])
            assert collective.get_embedding_variable("b", 4) is b
        for table in (a, b):
            assert isinstance(table, DynamicTable)
        assert a.shape.as_list() == [None, 3] and a.name == "a:0" and a in tf.trainable_variables()
        assert (
            b.name == "s/b:0" and b in tf.get_collection("mine") and b not in tf.global_variables()
        )
        with pytest.raises(TypeError, match="table 'c': ev_option is a collective.TablePolicy"):
            collective.get_embedding_variable("c", 4, ev_option=object())
        glorot, orthogonal = tf.glorot_uniform_initializer(), tf.orthogonal_initializer()
        for wrong, message in (
            (lambda: tf.get_variable("d", [None, 3], initializer=glorot), "fan_out"),
            (lambda: tf.get_variable("e", [None, 3], initializer=orthogonal), "single rows"),
            (lambda: tf.get_variable("f", [None, 3], tf.int32), "floating-point"),
            (lambda: collective.get_embedding_variable("g", 3, key_dtype=tf.float32), "key_dtype"),
            (lambda: collective.get_embedding_variable("h", 0), "positive"),
            (lambda: collective.get_embedding_variable("i", 3, steps_to_live=-1), "from 0, or"),
        ):
            with pytest.raises(ValueError, match=message):
                wrong()


@pytest.mark.slow
def test_a_session_that_is_gone_leaves_no_memory(strategy):
    gc.collect()
    before = len(row_store._registry)

    def use():
        with strategy.scope(), tf.Graph().as_default():
            t = collective.get_embedding_variable("t", D)
            train, _ = touch(t, np.arange(1000))
            with tf.Session() as session:
                for _ in range(3):  # initialized again, it forgets what was
                    session.run(tf.global_variables_initializer())
                    session.run(train)
                    assert t.local_count(session) <= 1000
                assert len(row_store._registry) <= before + 6

    use()
    gc.collect()
    # TensorFlow lets go of arrays when it next meets Python
    with tf.Graph().as_default(), tf.Session() as session:
        session.run(tf.numpy_function(lambda: np.float32(1), [], tf.float32))
    assert len(row_store._registry) <= before
