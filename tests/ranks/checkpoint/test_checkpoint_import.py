"""Any number of ranks goes on from what was imported, and exports it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import checkpoint
from collective.checkpoint.importing import key_buckets
from collective.coordination import barrier
from tests.foreign_checkpoints import deeprec, hybridbackend

RATE = 0.5


@pytest.fixture
def folder(tmp_path):
    return barrier.exchange(None, "a folder", {"path": str(tmp_path)})[0]["path"]


def on_rank_0(rank, function):
    barrier.run_on_all_ranks(None, "importing", lambda: None if rank else function())


@pytest.mark.slow
def test_a_job_goes_on_from_embedding_variables(strategy, rank, size, folder, monkeypatch):
    monkeypatch.setattr(key_buckets, "BUCKET_BYTES", 400)  # 12 or more parts
    random = np.random.default_rng(3)
    keys = np.unique(random.integers(0, 2**62, 60))
    rows = random.normal(size=(len(keys), 2)).astype(np.float32)
    slot = np.abs(random.normal(size=rows.shape)).astype(np.float32) + 1

    def write():
        entries = {"w": np.float32([[2.0], [3.0]]), "w/Adagrad": np.float32([[1.0], [1.0]])}
        entries["global_step"] = np.int64(70)
        for part in range(3):
            mine = keys % 3 == part
            stem = f"e/part_{part}"
            of_part = dict(zip(keys[mine], rows[mine]))
            entries |= deeprec.embedding_variable(stem, of_part)
            entries |= deeprec.embedding_variable(
                f"{stem}/Adagrad", dict(zip(keys[mine], slot[mine]))
            )
        deeprec.write(f"{folder}/theirs", entries)
        checkpoint.import_checkpoint("deeprec", f"{folder}/theirs", f"{folder}/ours/model.ckpt-70")

    on_rank_0(rank, write)
    with strategy.scope(), tf.Graph().as_default():
        table = collective.get_embedding_variable("e", 2)
        w = tf.get_variable("w", [2, 1])
        ids = tf.placeholder(tf.int64, [None])
        looked_up = tf.nn.embedding_lookup(table, ids)
        loss = tf.reduce_mean(tf.matmul(looked_up, w))
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdagradOptimizer(RATE).minimize(loss, global_step=step)
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=f"{folder}/ours", save_summaries_steps=None, log_step_count_steps=None
        ) as session:
            assert session.run(step) == 70
            found = session.run(looked_up, {ids: keys})
            np.testing.assert_array_equal(found, rows)
            session.run(train, {ids: keys})
            found = session.run(looked_up, {ids: keys})
    gradient = np.float64([2.0, 3.0]) / len(keys)
    expected = rows - RATE * gradient / np.sqrt(slot + gradient**2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)

    def serving():
        ids = tf.placeholder(tf.int64, [None])
        served = tf.nn.embedding_lookup(collective.get_embedding_variable("e", 2), ids)
        return tf.saved_model.predict_signature_def({"ids": ids}, {"rows": served})

    path = strategy.export_saved_model(f"{folder}/export", f"{folder}/ours/model.ckpt-70", serving)
    with tf.Graph().as_default(), tf.Session() as session:
        signature = tf.saved_model.load(session, ["serve"], path).signature_def["serving_default"]
        found = session.run(signature.outputs["rows"].name, {signature.inputs["ids"].name: keys})
        np.testing.assert_array_equal(found, rows)
    barrier.exchange(None, "served", {})


def test_a_session_restores_shards_of_hybridbackend(strategy, rank, size, folder):
    table = np.random.default_rng(4).normal(size=(13, 2)).astype(np.float32)

    def write():
        hybridbackend.write(f"{folder}/theirs", {}, {"t": table, "t/Adagrad": table**2 + 1}, 4)
        checkpoint.import_checkpoint("hybridbackend", f"{folder}/theirs", f"{folder}/ours")

    on_rank_0(rank, write)
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [13, 2])
        rows = tf.nn.embedding_lookup(t, tf.range(13))
        train = tf.train.AdagradOptimizer(RATE).minimize(tf.reduce_sum(rows))
        saver = tf.train.Saver()
        with tf.Session() as session:
            saver.restore(session, f"{folder}/ours")
            np.testing.assert_array_equal(session.run(rows), table)
            session.run(train)
            expected = table - RATE / np.sqrt(table**2 + 2)
            np.testing.assert_allclose(session.run(rows), expected, rtol=1e-5)
