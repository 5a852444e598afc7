"""Each item of work goes to one rank, and a job goes on with those that none has taken."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow.compat.v1 as tf

from collective.compat.parquet import ParquetDataset
from collective.data import WorkQueue, dataset_analysis, resumable
from collective.estimator import input_sharding
from collective.ops.communication import collectives

ITEMS = [f"part-{i}" for i in range(7)]


@pytest.fixture
def queues(monkeypatch):
    """Returns a function that makes the queues of all of N ranks."""

    def make(ranks, works=ITEMS, **options):
        monkeypatch.setattr(collectives, "size", lambda: ranks)
        made = []
        for rank in range(ranks):
            monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
            with tf.Graph().as_default():
                made.append(WorkQueue(works, **options))
        return made

    return make


def taken(queue, most=100):
    return [item for _, item in zip(range(most), queue._taken_items())]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_items_are_dealt_in_turn_each_epoch(queues, ranks, shuffle):
    (whole,) = queues(1, num_epochs=2, shuffle=shuffle, prefix="hdfs://")
    order = taken(whole)
    assert order == [f"hdfs://{item}" for item in whole._all_items]
    assert sorted(order[:7]) == sorted(order[7:]) == [f"hdfs://{item}" for item in ITEMS]
    assert (order[:7] == order[7:]) is not shuffle
    got = [taken(queue) for queue in queues(ranks, num_epochs=2, shuffle=shuffle, prefix="hdfs://")]
    assert got == [order[rank::ranks] for rank in range(ranks)]


@pytest.mark.parametrize("counts", [(0,), (3,), (2, 2), (3, 1), (0, 2, 1)])
@pytest.mark.parametrize("then", [1, 2, 3])
def test_another_number_of_ranks_goes_on_with_what_none_has_taken(queues, counts, then):
    """Ranks needn't have taken as many: files are of several lengths."""
    before = queues(len(counts), num_epochs=2, seed=5)
    used = [item for queue, count in zip(before, counts) for item in taken(queue, count)]
    before[0].gather([queue.contribution() for queue in before])
    remaining = before[0]._take_remaining()
    after = queues(then, num_epochs=2, seed=5)
    for queue in after:
        assert queue._go_on(b"same", b"same", remaining)
    used += [item for queue in after for item in taken(queue)]
    assert sorted(used) == sorted(ITEMS * 2)
    assert [item for item in before[0]._all_items if item in used]


def test_other_items_than_a_checkpoints_begin_again(queues, capsys):
    (queue,) = queues(1, shuffle=False)
    assert not queue._go_on(b"other", b"one", np.array([b"x"], object))
    assert (
        "the checkpoint's queue has other items; this one begins from the start"
        in capsys.readouterr().err
    )
    assert taken(queue) == ITEMS


def job(folder, works, steps, with_queue=True):
    """Trains some steps, as a job that may go on from a checkpoint; returns the items it used."""
    used = []
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        queue = WorkQueue(works, shuffle=False) if with_queue else None
        item = queue.take() if with_queue else tf.constant("")
        train = step.assign_add(1)
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=str(folder), save_checkpoint_steps=1000, log_step_count_steps=None
        ) as session:
            for _ in range(steps):
                if session.should_stop():
                    break
                used.append(session.run([item, train])[0].decode())
    return used


def test_a_session_saves_and_restores_its_place(tmp_path):
    assert job(tmp_path, ITEMS, 3) == ITEMS[:3]
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path)))
    assert reader.get_tensor("work_queue/works").tolist() == [i.encode() for i in ITEMS[3:]]
    assert job(tmp_path, ITEMS, 2) == ITEMS[3:5]
    assert job(tmp_path, ITEMS[:4], 1) == ITEMS[:1]


def test_a_queue_fills_readers_and_summaries():
    with tf.Graph().as_default():
        queue = WorkQueue(ITEMS[:3], num_epochs=2, shuffle=False)
        item = queue.input_producer().dequeue()
        queue.add_summary()
        summary = tf.summary.merge_all()
        with tf.Session() as session:
            coordinator = tf.train.Coordinator()
            threads = tf.train.start_queue_runners(session, coordinator)
            got = [session.run(item).decode() for _ in range(6)]
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(item)
            coordinator.request_stop()
            coordinator.join(threads)
            (value,) = tf.Summary.FromString(session.run(summary)).value
    assert got == ITEMS[:3] * 2
    assert value.tag.endswith("fraction_of_6_full") and value.simple_value == 0


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("reader", ["lines", "records", "interleave", "parquet"])
def test_records_of_fewer_items_than_ranks_are_dealt(monkeypatch, tmp_path, ranks, reader):
    """Each record of each epoch goes to one rank; most scripts have one file."""
    files = [str(tmp_path / name) for name in ("a", "b")[: ranks - 1]]
    want = [f"{file[-1]}{i}" for file in files for i in range(7)]
    for file in files:
        records = [record for record in want if record[0] == file[-1]]
        Path(file).write_text("".join(f"{record}\n" for record in records))
        if reader == "records":
            with tf.io.TFRecordWriter(file) as writer:
                for record in records:
                    writer.write(record.encode())
        if reader == "parquet":
            pq.write_table(pa.table({"x": records}), file)
    read = {
        "lines": lambda items: tf.data.TextLineDataset(items.shuffle(1)),
        "records": tf.data.TFRecordDataset,
        "interleave": lambda items: items.interleave(tf.data.TextLineDataset),
        "parquet": lambda items: ParquetDataset(items).map(lambda batch: batch["x"][0]),
    }
    got = []
    monkeypatch.setattr(collectives, "size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        with tf.Graph().as_default(), tf.Session() as session:
            queue = WorkQueue(files, num_epochs=2)
            dataset = read[reader](queue.input_dataset())
            assert dataset_analysis.is_of_work_queue(dataset)
            record = tf.data.make_one_shot_iterator(dataset).get_next()
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    got.append(session.run(record).decode())
            assert queue._remaining_part() == 0 and not len(queue._take_remaining())
            with pytest.raises(ValueError, match="a rank without one would end training at once"):
                queue.take()
    assert sorted(got) == sorted(2 * want)


def test_a_queue_has_items(queues):
    with pytest.raises(ValueError, match="WorkQueue has no items"):
        queues(1, works=[])
    (queue,) = queues(1)
    assert len(queue) == 7 and queue.works == ITEMS


@pytest.mark.parametrize("works", ["a.csv", b"a.csv", Path("a.csv")])
def test_one_string_is_no_list_of_items(works):
    """Its characters would be dealt."""
    with pytest.raises(ValueError, match=r"given one item, .*: write WorkQueue\(\['a.csv'\]\)"):
        WorkQueue(works)


@pytest.mark.parametrize("num_epochs", [0, -1, 1.5, True, "2", None])
def test_items_are_dealt_a_whole_number_of_times(num_epochs):
    message = re.escape(f"WorkQueue(num_epochs={num_epochs!r}): items are dealt a whole number")
    with pytest.raises(ValueError, match=message):
        WorkQueue(ITEMS, num_epochs)


@pytest.mark.parametrize("again", [input_sharding.deal, input_sharding.shard])
def test_items_are_dealt_once(monkeypatch, tmp_path, again):
    """An Estimator dealt the batches of a rank's own files once more: half of them were lost."""
    for item in ITEMS[:4]:
        (tmp_path / item).write_text(f"{item} a\n{item} b\n")
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    with tf.Graph().as_default():
        queue = WorkQueue(ITEMS[:4], shuffle=False, prefix=f"{tmp_path}/")
        with tf.name_scope("input"):
            lines = again(tf.data.TextLineDataset(queue.input_dataset()))
        line, got = tf.data.make_one_shot_iterator(lines).get_next(), []
        with tf.Session() as session, pytest.raises(tf.errors.OutOfRangeError):
            while True:
                got.append(session.run(line))
    assert got == [b"part-1 a", b"part-1 b", b"part-3 a", b"part-3 b"]
    with tf.init_scope():
        items = WorkQueue(ITEMS[:4], shuffle=False).input_dataset()
        assert list(again(items).as_numpy_iterator()) == [b"part-1", b"part-3"]


def test_items_are_no_records_of_resumable(monkeypatch):
    """It would leave out records: those of a rank's own files that would be other ranks'."""
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    with tf.Graph().as_default():
        lines = tf.data.TextLineDataset(WorkQueue(ITEMS).input_dataset())
        with pytest.raises(ValueError, match="items of a WorkQueue.*Give it a dataset of all"):
            resumable(lines, batch_size=2)
