"""Records of files come once an epoch, shuffled as a whole, from any batch on."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import data
from collective.data.permutation import shuffled
from collective.data.record_files import RecordFiles
from collective.ops.communication import collectives


def read(make):
    """Returns the elements of the dataset that `make` makes."""
    with tf.Graph().as_default():
        element = tf.data.make_one_shot_iterator(make()).get_next()
        elements = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            while True:
                try:
                    elements.append(session.run(element))
                except tf.errors.OutOfRangeError:
                    return elements


def write(path, records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return str(path)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 65537])
def test_a_shuffled_epoch_has_each_record_once(size):
    orders = [shuffled(np.arange(size), size, 7, epoch) for epoch in range(3)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(size))
    if size > 10:
        assert len({tuple(order) for order in orders}) == 3
        assert not np.array_equal(orders[0], shuffled(np.arange(size), size, 8, 0))
    # Any places of it alone are what they are among all.
    places = np.arange(0, size, 3)
    assert np.array_equal(shuffled(places, size, 7, 1), orders[1][places])


def test_a_shuffled_epoch_looks_random():
    """Neighbours are as far apart as in a random order, and places fall evenly."""
    size, bins = 20_000, 10
    for epoch in range(5):
        order = shuffled(np.arange(size), size, 3, epoch)
        counts = np.zeros((bins, bins))
        np.add.at(counts, (np.arange(size) * bins // size, order * bins // size), 1)
        expected = size / bins**2
        # 81 degrees of freedom: chi-squared is below 140 in all but one case of 10,000.
        assert ((counts - expected) ** 2 / expected).sum() < 140
        distance = np.abs(np.diff(order)).mean() / size
        assert distance == pytest.approx(1 / 3, abs=0.01)


def test_records_are_those_that_tensorflow_reads(tmp_path):
    random = np.random.default_rng(1)
    records = [random.bytes(int(n)) for n in random.integers(0, 40, 50)]
    files = [write(tmp_path / "a", records[:20]), write(tmp_path / "b", records[20:])]
    want = read(lambda: tf.data.TFRecordDataset(files))
    assert want == records
    assert read(lambda: data.records(files)) == want
    assert read(lambda: data.records(str(tmp_path / "*"), epochs=2)) == want * 2
    mixed = read(lambda: data.records(files, shuffle=True, seed=4, epochs=2))
    assert sorted(mixed[:50]) == sorted(mixed[50:]) == sorted(records)
    assert mixed[:50] != mixed[50:] and mixed[:50] != records


@pytest.mark.parametrize("text", [b"a\nbc\n\nd", b"a\r\nb\r\n", b"\n", b"x", b"a\n\n"])
@pytest.mark.parametrize("skip", [0, 1])
def test_lines_are_those_that_tensorflow_reads(tmp_path, text, skip):
    files = [str(tmp_path / name) for name in "ab"]
    for path in files:
        with open(path, "wb") as file:
            file.write(b"first\n" + text)
    want = [
        line
        for path in files
        for line in read(lambda path=path: tf.data.TextLineDataset(path).skip(skip))
    ]
    assert read(lambda: data.records(files, format="lines", skip_lines=skip)) == want


@pytest.mark.parametrize("ranks", [1, 3])
def test_they_are_dealt_by_global_batches(monkeypatch, tmp_path, ranks):
    records = [b"%d" % i for i in range(11)]
    path = write(tmp_path / "a", records)
    order = read(lambda: data.records(path, shuffle=True, seed=4, epochs=2))
    monkeypatch.setattr(collectives, "size", lambda: ranks)
    steps = []
    for rank in range(ranks):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        batches = read(
            lambda: data.resumable(data.records(path, shuffle=True, seed=4, epochs=2), 6)
        )
        steps.append([batch.tolist() for batch in batches])
    assert [sum(parts, []) for parts in zip(*steps)] == [order[i : i + 6] for i in range(0, 22, 6)]


def test_what_is_no_such_file_is_named(tmp_path):
    whole = write(tmp_path / "whole", [b"abc", b"defg"])
    cut = str(tmp_path / "cut")
    with open(whole, "rb") as file, open(cut, "wb") as out:
        out.write(file.read()[:-3])
    text, packed, empty = (str(tmp_path / name) for name in ("text", "packed", "empty"))
    with open(text, "w") as file:
        file.write("some lines\nof text\n")
    with gzip.open(packed, "w") as file:
        file.write(b"lines\n")
    open(empty, "w").close()
    with tf.Graph().as_default():
        for path, options, message in (
            (cut, {}, "cut: it is no whole TFRecord file: the record at byte 19"),
            (text, {}, r"at byte 0 .*Lines of text are read by format='lines'"),
            (packed, {}, r"packed: it is compressed \(gzip\)"),
            (packed, {"format": "lines"}, r"packed: it is compressed \(gzip\)"),
            (empty, {}, "1 file without a record: .*empty"),
            (empty, {"format": "lines"}, "1 file without a record"),
            ("gs://bucket/a", {}, "gs://bucket/a: records are read from local files"),
            (str(tmp_path / "none*"), {}, "there are no files: "),
            (whole, {"format": "csv"}, "format='csv'"),
            (whole, {"seed": -1}, "seed=-1"),
            (whole, {"epochs": 0}, "epochs=0"),
            (whole, {"skip_lines": 1}, "skip_lines=1"),
        ):
            with pytest.raises(ValueError, match=message):
                data.records(path, **options)
        with pytest.raises(OSError, match="nothing"):
            data.records(str(tmp_path / "nothing"))
        (tmp_path / "folder" / "inner").mkdir(parents=True)
        with pytest.raises(ValueError, match="inner: it is a folder, not a file of records"):
            data.records(str(tmp_path / "folder"))
    source = RecordFiles([whole], "tfrecord")
    assert source.read(np.array([1, 0])) == [b"defg", b"abc"]
    with open(whole, "r+b") as file:
        file.truncate(20)
    with pytest.raises(ValueError, match="whole: it has 20 bytes, and had a record up to byte 35"):
        source.read(np.array([1]))
