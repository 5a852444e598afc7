"""Checkpoints of dynamic tables restore keys, rows and slots, and list the keys ascending."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import checkpoint
from collective.checkpoint import __main__ as command
from collective.checkpoint.files import tensor_bundle as bundles
from collective.coordination import barrier

pytestmark = pytest.mark.double

KEYS = np.array([-(2**63), 2**63 - 1, -1, 0, 5, 10**12, -77, 8, 9, 10, 11, 12], np.int64)


@pytest.fixture
def folder(tmp_path):
    return barrier.exchange(None, "a folder", {"path": str(tmp_path)})[0]["path"]


def model(name="e", optimizer=None):
    table = collective.get_embedding_variable(name, 2, initializer=tf.ones_initializer())
    ids = tf.placeholder(tf.int64, [None])
    rows = tf.nn.embedding_lookup(table, ids)
    step = tf.train.get_or_create_global_step()
    train = (optimizer or tf.train.AdagradOptimizer(0.5)).minimize(
        tf.reduce_sum(rows * tf.cast(ids % 7 + 1, tf.float32)[:, None]), global_step=step
    )
    return table, ids, rows, train


def saved(strategy, rank, size, path):
    """Trains the keys r, r + N, … on rank r; returns all rows, looked up by every rank."""
    with strategy.scope(), tf.Graph().as_default():
        table, ids, rows, train = model()
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(train, {ids: KEYS[rank::size]})
            saver.save(session, path)
            out = session.run(rows, {ids: KEYS})
            total = table.total_count()
            assert session.run(total) == len(KEYS)
            return out


def restored(strategy, path, initialize):
    with strategy.scope(), tf.Graph().as_default():
        table, ids, rows, train = model()
        saver = tf.train.Saver()
        with tf.Session() as session:
            if initialize:
                session.run(tf.global_variables_initializer())
                session.run(train, {ids: [123, 456]})  # gone after the restore
            saver.restore(session, path)
            found, others = session.run(rows, {ids: KEYS}), session.run(rows, {ids: [123, 456]})
            np.testing.assert_array_equal(others, 0)
            session.run(train, {ids: KEYS[:1]})  # its slots are there, too
            return found


@pytest.mark.slow
@pytest.mark.parametrize("initialize, slices", [(False, bundles.SLICE_BYTES), (True, 16)])
def test_rows_come_back(strategy, rank, size, folder, initialize, slices, monkeypatch):
    monkeypatch.setattr(bundles, "SLICE_BYTES", slices)
    want = saved(strategy, rank, size, f"{folder}/m")
    assert (want != 1).all() and (want != 0).all()
    np.testing.assert_array_equal(restored(strategy, f"{folder}/m", initialize), want)


@pytest.mark.slow
def test_read_in_the_order_of_keys(strategy, rank, size, folder, monkeypatch):
    monkeypatch.setattr(bundles, "SLICE_BYTES", 16)
    want = saved(strategy, rank, size, f"{folder}/m")
    order = np.argsort(KEYS)
    reader = tf.train.load_checkpoint(folder)
    for r in range(size):
        keys = reader.get_tensor(f"e/keys/part_{r}")
        assert (np.diff(keys.astype(object)) > 0).all()
        assert (
            reader.get_tensor(f"e/part_{r}").shape
            == reader.get_tensor(f"e/Adagrad/part_{r}").shape
            == (len(keys), 2)
        )
    if rank == 0:
        assert command.main(["consolidate", folder, f"{folder}/whole"]) == 0
    barrier.exchange(None, "wait", {})
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(f"{folder}/whole").get_tensor("e/keys/part_0"), KEYS[order]
    )
    for path in (f"{folder}/m", f"{folder}/whole"):
        for block in (1, 5, 1000):
            keys, rows = zip(*checkpoint.read_table(path, "e", block=block))
            assert all(len(k) <= block for k in keys)
            np.testing.assert_array_equal(np.concatenate(keys), KEYS[order])
            np.testing.assert_array_equal(np.concatenate(rows), want[order])
    np.testing.assert_array_equal(restored(strategy, f"{folder}/whole", False), want)


def test_a_table_without_keys(strategy, folder):
    with strategy.scope(), tf.Graph().as_default():
        table, ids, rows, _ = model()
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            saver.save(session, f"{folder}/m")
            saver.restore(session, f"{folder}/m")
            np.testing.assert_array_equal(session.run(rows, {ids: KEYS}), 0)
    assert list(checkpoint.read_table(folder, "e")) == []


def test_it_starts_from_a_checkpoint(strategy, rank, size, folder):
    want = saved(strategy, rank, size, f"{folder}/m")
    with strategy.scope(), tf.Graph().as_default():
        table, ids, rows, train = model("other")
        tf.train.init_from_checkpoint(folder, {"e": "other"})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(rows, {ids: KEYS}), want)
            session.run(train, {ids: KEYS[:1]})
            # its slots start fresh
            tf.train.Saver({"e": table}).restore(session, f"{folder}/m")
            np.testing.assert_array_equal(session.run(rows, {ids: KEYS}), want)


@pytest.mark.slow
def test_what_does_not_fit(strategy, rank, size, folder):
    saved(strategy, rank, size, f"{folder}/m")
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            static = tf.get_variable("e", [12, 2])
        with tf.Session() as session:
            with pytest.raises(
                tf.errors.InvalidArgumentError,
                match="'e' is static here, dynamic in the checkpoint",
            ):
                tf.train.Saver([static]).restore(session, f"{folder}/m")
    with strategy.scope(), tf.Graph().as_default():
        optimizer = tf.train.AdamOptimizer(0.1)
        table, _, _, _ = model(optimizer=optimizer)
        with pytest.raises(ValueError, match="a slot of the dynamic table 'e', but not the table"):
            tf.train.Saver([optimizer.get_slot(table, "m")])
        with tf.Session() as session:
            with pytest.raises(
                tf.errors.NotFoundError,
                match=r"no 'e/Adam'.*it was written with Adagrad \(e/Adagrad\)",
            ):
                tf.train.Saver().restore(session, f"{folder}/m")
    with strategy.scope(missing_slots="fresh"), tf.Graph().as_default():
        table, ids, rows, train = model(optimizer=tf.train.AdamOptimizer(0.1))
        with tf.Session() as session:
            tf.train.Saver().restore(session, f"{folder}/m")
            session.run(train, {ids: KEYS})
