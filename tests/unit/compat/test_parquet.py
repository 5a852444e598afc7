"""Parquet files are read in their order, each record once, with the types of their columns."""

from __future__ import annotations

import pyarrow
import pyarrow.parquet
import pytest
import tensorflow.compat.v1 as tf

from collective.compat import hybridbackend_data, parquet

RESTORED = {"key_idx_field_names": ["index"], "value_field_names": [["user"]]}


def write(path, first, count, **columns):
    ids = list(range(first, first + count))
    table = {
        "id": pyarrow.array(ids, pyarrow.int64()),
        "x": pyarrow.array([i / 2 for i in ids], pyarrow.float32()),
        "name": [f"n{i}" for i in ids],
        "tags": pyarrow.array([[i] * (i % 3) for i in ids], pyarrow.list_(pyarrow.int32())),
        **columns,
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path, row_group_size=3)
    return str(path)


def read(make):
    with tf.Graph().as_default():
        element = tf.data.make_one_shot_iterator(make()).get_next()
        batches = []
        with tf.Session() as session:
            while True:
                try:
                    batches.append(session.run(element))
                except tf.errors.OutOfRangeError:
                    return batches


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path / "a", 0, 7), write(tmp_path / "b", 7, 4)]


def test_batches(files):
    batches = read(lambda: parquet.ParquetDataset(files, batch_size=5))
    assert [list(b["id"]) for b in batches] == [[0, 1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
    first = batches[0]
    assert first["x"].dtype == "float32" and list(first["name"]) == [b"n%d" % i for i in range(5)]
    assert first["tags"].to_list() == [[], [1], [2, 2], [], [4]]
    assert first["tags"].values.dtype == "int32"
    whole = read(lambda: parquet.ParquetDataset(files, 5, ["id"], drop_remainder=True))
    assert [list(b) for b in whole] == [["id"]] and len(whole[0]["id"]) == 5


def test_row_groups_of_a_partition(files):
    parts = [read(lambda i=i: parquet.ParquetDataset(files, 100, ["id"], 2, i)) for i in range(2)]
    assert [[list(b["id"]) for b in part] for part in parts] == [
        [[0, 1, 2, 6], [7, 8, 9]],
        [[3, 4, 5], [10]],
    ]


def test_records_of_a_dataset_of_paths(files):
    fields = [parquet.DataFrame.Field("id", tf.int64)]

    def make():
        names = tf.data.Dataset.from_tensor_slices(files)
        return names.apply(parquet.read_parquet(2, fields))

    assert sum((list(b["id"]) for b in read(make)), []) == list(range(11))
    records = read(lambda: hybridbackend_data.Dataset.from_parquet(files).batch(6))
    assert [list(b["id"]) for b in records] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


def test_what_cannot_be_read(tmp_path, files):
    with pytest.raises(ValueError, match="has no column 'y'"):
        parquet.ParquetDataset(files, fields=["y"])
    with pytest.raises(ValueError, match="needs fields="):
        parquet.ParquetDataset(tf.data.Dataset.from_tensor_slices(files))
    days = pyarrow.array([1, 2], pyarrow.date32())
    with pytest.raises(ValueError, match=r"column 'day' is of type date32\[day\]"):
        parquet.ParquetDataset(write(tmp_path / "c", 0, 2, day=days))
    holes = write(tmp_path / "d", 0, 2, x=pyarrow.array([1.0, None], pyarrow.float32()))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="/d, row group 0, column 'x': 1 of 2 values are miss"
    ):
        read(lambda: parquet.ParquetDataset(holes))


def test_what_blocks_store_once_is_restored(tmp_path):
    """HybridBackend's deduplicate() leaves the other columns as they are; parse() makes tensors."""
    blocks = {"user": [[7, 9], [4]], "index": [[0, 1, 0], [0, 0]], "item": [[1], [2, 3]]}
    pyarrow.parquet.write_table(pyarrow.table(blocks), tmp_path / "a")

    def make():
        dataset = parquet.ParquetDataset(tmp_path / "a", batch_size=2)
        dataset = dataset.apply(hybridbackend_data.deduplicate(["index"], [["user"]]))
        return dataset.apply(hybridbackend_data.parse(pad=True))

    (batch,) = read(make)
    assert batch["user"].tolist() == [7, 9, 7, 4, 4]
    assert batch["item"].tolist() == [[1, 0], [2, 3]]
    (sparse,) = read(
        lambda: parquet.ParquetDataset(tmp_path / "a", 2).apply(hybridbackend_data.parse())
    )
    assert sparse["item"].values.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="1 column of numbers for 0 groups"):
        hybridbackend_data.deduplicate(["index"], [])
    whole = hybridbackend_data.Dataset.from_parquet
    (batch,) = read(lambda: whole(tmp_path / "a", None, **RESTORED, to_dense=True).batch(2))
    assert list(batch) == ["user", "item"] and batch["user"].tolist() == [7, 9, 7, 4, 4]
    assert batch["item"].tolist() == [[1, 0], [2, 3]]
    paths = lambda: tf.data.Dataset.from_tensors(str(tmp_path / "a"))  # noqa: E731
    fields = [parquet.Field(name, tf.int64, 1) for name in blocks]
    (same,) = read(lambda: whole(paths(), fields, **RESTORED).batch(2))
    assert same["user"].tolist() == [7, 9, 7, 4, 4] and same["item"].values.tolist() == [1, 2, 3]


def test_batches_of_another_size(files):
    make = lambda: parquet.ParquetDataset(files, 5, ["id"]).apply(hybridbackend_data.rebatch(4))  # noqa: E731
    assert [list(b["id"]) for b in read(make)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_fields_with_types_are_checked_and_numbers_cast(files):
    def make(kind, rank=0):
        paths = tf.data.Dataset.from_tensor_slices(files)
        return parquet.ParquetDataset(paths, 20, [parquet.Field("id", kind, rank)])

    assert read(lambda: make(tf.int32))[0]["id"].dtype == "int32"
    for kind, rank in ((tf.string, 0), (tf.int64, 1)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="/a, all row groups, column 'id'"):
            read(lambda k=kind, r=rank: make(k, r))


def test_records_become_batches_over_all_files(files):
    """Lists are sparse or padded; a column that no file has is its default."""
    fields = [
        parquet.Field("id", tf.int64),
        parquet.Field("new", tf.int64, default_value=42),
        parquet.Field("tags", tf.int32, 1),
    ]
    whole = hybridbackend_data.Dataset.from_parquet
    first, last = read(lambda: whole(files, fields).batch(8))
    assert list(first["id"]) == list(range(8)) and list(last["id"]) == [8, 9, 10]
    assert list(first["new"]) == [42] * 8 and list(last["new"]) == [42] * 3
    assert first["tags"].values.tolist() == [1, 2, 2, 4, 5, 5, 7]
    (only,) = read(lambda: whole(files, fields, to_dense={"tags": True}).batch(8, True))
    assert only["tags"].tolist() == [[0, 0], [1, 0], [2, 2], [0, 0], [4, 0], [5, 5], [0, 0], [7, 0]]
    mixed = read(lambda: whole(files, fields).shuffle_batch(4, buffer_size=11, seed=1))
    ids = [int(record) for batch in mixed for record in batch["id"]]
    assert ids != sorted(ids) == list(range(11)) and [len(b["id"]) for b in mixed] == [4, 4, 3]
    part = read(lambda: whole(files, ["id"], 2, 1).batch(100))
    assert [list(b["id"]) for b in part] == [[3, 4, 5, 10]]
    populated = hybridbackend_data.populate_defaults(fields, 5)
    batches = read(
        lambda: parquet.ParquetDataset(files[:1], 5, ["id"], 1, 0, True).apply(populated)
    )
    assert list(batches[0]) == ["id", "new"] and list(batches[0]["new"]) == [42] * 5


def test_what_a_dataset_of_records_refuses(files):
    whole = hybridbackend_data.Dataset.from_parquet
    for option in ("skip_corrupted_data", "field_ignore_case", "field_map_fn"):
        with pytest.raises(
            NotImplementedError, match=rf"from_parquet\({option}=…\) is not supported"
        ):
            whole(files, **{option: True})
    with pytest.raises(NotImplementedError, match="from_orc is not supported.*as Parquet"):
        hybridbackend_data.Dataset.from_orc(files)
    with pytest.raises(NotImplementedError, match=r"parse\(pad=\[2, 3\]\) is not supported"):
        hybridbackend_data.parse(pad={"tags": [2, 3]})


def test_lists_are_batched_again(files):
    make = lambda: parquet.ParquetDataset(files, 5, ["tags"]).apply(hybridbackend_data.rebatch(4))  # noqa: E731
    assert [b["tags"].to_list() for b in read(make)][1:] == [
        [[4], [5, 5], [], [7]],
        [[8, 8], [], [10]],
    ]
