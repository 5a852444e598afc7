"""Data that are dealt to the ranks: each record once, errors on all, a place in checkpoints."""

import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, data
from collective.coordination import barrier
from tests.ranks import reference

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]


@pytest.fixture
def folder(tmp_path):
    """Returns rank 0's folder, which all ranks see."""
    return barrier.exchange(None, "a folder", {"path": str(tmp_path)})[0]["path"]


def of_all_ranks(values):
    """Returns what all ranks have, in their order."""
    return [each["values"] for each in barrier.exchange(None, "values", {"values": values})]


def write(path, rank, groups, rows):
    """Lets rank 0 write a file of some row groups, whose records are numbered."""
    if rank == 0:
        table = pyarrow.table({"id": np.arange(groups * rows)})
        pyarrow.parquet.write_table(table, path, row_group_size=rows, use_dictionary=False)
    barrier.exchange(None, "written", {})


def build(strategy, batch):
    with strategy.embedding_scope():
        table = reference.table("t", 100, 2)
    rows = tf.nn.embedding_lookup(table, batch)
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.1).minimize(
        tf.reduce_mean(tf.square(rows)), global_step=step
    )
    return train


def trained(strategy, path, size, start, steps):
    """Trains some steps after `start` batches; returns this rank's records."""
    used = []
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        dataset = data.parquet(path, batch_size=3, shuffle=True, start=start)
        ids = tf.data.make_one_shot_iterator(strategy.shard(dataset)).get_next()["id"]
        train = build(strategy, ids)
        with tf.train.MonitoredTrainingSession() as session:
            for _ in range(steps):
                if session.should_stop():
                    break
                used += session.run([ids, train])[0].tolist()
    return used


def test_each_record_is_used_once_over_ranks_and_a_restart(strategy, rank, size, folder):
    write(f"{folder}/a", rank, 5, 3 * size)
    used = of_all_ranks(trained(strategy, f"{folder}/a", size, 0, 2))
    used += of_all_ranks(trained(strategy, f"{folder}/a", size, 2 * size, 100))
    assert sorted(record for share in used for record in share) == list(range(15 * size))
    assert {len(share) for share in used} == {6, 9}


def test_a_row_group_that_one_rank_cannot_read_is_an_error_on_all(strategy, rank, size, folder):
    """No rank takes the step, and none is left waiting."""
    path = f"{folder}/a"
    write(path, rank, 2 * size, 4)
    if rank == 0:
        chunk = pyarrow.parquet.read_metadata(path).row_group(2 * size - 1).column(0)
        with open(path, "r+b") as file:
            file.seek(chunk.data_page_offset)
            file.write(b"\xff" * chunk.total_compressed_size)
    barrier.exchange(None, "damaged", {})
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        dataset = data.parquet(path, batch_size=4)
        train = build(strategy, tf.data.make_one_shot_iterator(dataset).get_next()["id"])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            with pytest.raises(
                (RankError, tf.errors.InvalidArgumentError),
                match=f"row group {2 * size - 1}, column 'id'",
            ):
                session.run(train)
            if rank == size - 1 > 0:
                with pytest.raises(RankError):
                    session.run(train)  # A rank that survives its error tells the others now.
            assert session.run(tf.train.get_global_step()) == 1


def worked(strategy, folder, works, steps):
    """Trains some steps from the latest checkpoint on, an item a step; returns this rank's."""
    used = []
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        item = data.WorkQueue(works, num_epochs=2, seed=3).take()
        train = build(strategy, tf.reshape(tf.strings.to_number(item, tf.int64), [1]))
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=1000
        ) as session:
            for _ in range(steps):
                if session.should_stop():
                    break
                used.append(int(session.run([item, train])[0]))
    return used


@pytest.mark.slow
def test_a_work_queue_goes_on_from_a_checkpoint(strategy, rank, size, folder):
    works = [str(i) for i in range(3 * size)]
    used = of_all_ranks(worked(strategy, folder, works, 4))
    latest = tf.train.latest_checkpoint(folder)
    assert os.path.basename(latest) == "model.ckpt-4"
    left = tf.train.load_variable(latest, "work_queue/works")
    assert len(left) == 2 * size
    used += of_all_ranks(worked(strategy, folder, works, 100))
    assert sorted(item for share in used for item in share) == sorted([*range(3 * size)] * 2)
    # A graph with a queue that no checkpoint has begins with all of its items.
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        queue = data.WorkQueue(works, shuffle=False, name="other")
        build(strategy, tf.constant([1], tf.int64))
        item = queue.take()
        with tf.Session() as session:
            tf.train.Saver(
                [*tf.global_variables(), *tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)]
            ).restore(session, latest)
            assert int(session.run(item)) == rank
