"""Parquet files are read batch by batch into tensors, and what can't be read is named."""

from __future__ import annotations

import re
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow.compat.v1 as tf

from collective import data
from collective.data import arrow
from collective.data.batch_reader import BatchReader
from collective.data.columns import column_of
from collective.data.parquet_files import ParquetFiles, list_files
from collective.data.record_order import RecordOrder
from collective.estimator import input_sharding
from collective.ops.communication import collectives
from tests import object_store

ROOT = Path(__file__).resolve().parents[3]


def write(path, first, count, rows=3, **columns):
    """Writes records first, first + 1, …, in row groups of `rows`; returns the path."""
    ids = range(first, first + count)
    table = {
        "id": pyarrow.array(ids, pyarrow.int64()),
        "x": pyarrow.array([i / 2 for i in ids], pyarrow.float32()),
        "name": [f"n{i}" for i in ids],
        "tags": pyarrow.array([[i] * (i % 3) for i in ids], pyarrow.list_(pyarrow.int32())),
        **columns,
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path, row_group_size=rows)
    return str(path)


def read(make):
    """Returns the batches of the dataset that `make` makes, as arrays."""
    with tf.Graph().as_default():
        element = tf.data.make_one_shot_iterator(make()).get_next()
        batches = []
        with tf.Session() as session:
            while True:
                try:
                    batches.append(session.run(element))
                except tf.errors.OutOfRangeError:
                    return batches


def ids(batches):
    return [batch["id"].tolist() for batch in batches]


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path / "a.parquet", 0, 7), write(tmp_path / "b.parquet", 7, 4)]


def test_types_and_depths_come_from_the_footer(tmp_path):
    nested = [[[i], []] if i % 2 else [] for i in range(4)]
    path = write(
        tmp_path / "a",
        0,
        4,
        fixed=pyarrow.array([[i, i + 1] for i in range(4)], pyarrow.list_(pyarrow.float32(), 2)),
        nested=pyarrow.array(nested, pyarrow.list_(pyarrow.list_(pyarrow.int64()))),
        words=[["a", "bc"] * (i % 2) for i in range(4)],
        choice=pyarrow.array(["u", "v", "u", "u"]).dictionary_encode(),
        flag=[True, False, True, True],
    )
    (batch,) = read(lambda: data.parquet(path))
    assert batch["id"].dtype == "int64" and batch["x"].dtype == "float32"
    assert batch["x"].tolist() == [0, 0.5, 1, 1.5]
    assert batch["name"].tolist() == [b"n0", b"n1", b"n2", b"n3"]
    assert batch["tags"].to_list() == [[], [1], [2, 2], []]
    assert batch["tags"].values.dtype == "int32"
    assert batch["fixed"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert batch["nested"].to_list() == nested
    assert batch["words"].to_list() == [[], [b"a", b"bc"], [], [b"a", b"bc"]]
    assert batch["choice"].tolist() == [b"u", b"v", b"u", b"u"]
    assert batch["flag"].tolist() == [True, False, True, True]


def test_columns_are_chosen_in_other_forms(files):
    forms = {"tags": "sparse", "x": "sparse", "id": None}
    batch = read(lambda: data.parquet(files, forms, 5))[0]
    assert list(batch) == ["tags", "x", "id"]
    assert batch["tags"].dense_shape.tolist() == [5, 2]
    assert batch["tags"].indices.tolist() == [[1, 0], [2, 0], [2, 1], [4, 0]]
    assert batch["tags"].values.tolist() == [1, 2, 2, 4]
    assert batch["x"].indices.tolist() == [[i, 0] for i in range(5)]
    padded = read(lambda: data.parquet(files, {"tags": "dense"}, 4))[0]["tags"]
    assert padded.tolist() == [[0, 0], [1, 0], [2, 2], [0, 0]]
    with pytest.raises(ValueError, match=r"column 'x' \(float32\) can't be 'ragged'"):
        data.parquet(files, {"x": "ragged"})


def test_batches_have_the_shapes_that_a_model_needs(files):
    with tf.Graph().as_default():
        spec = data.parquet(files, ["id", "tags"], 5).element_spec
    assert spec["id"].shape.as_list() == [None]
    assert spec["tags"].ragged_rank == 1 and spec["tags"].dtype == tf.int32


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_dealt_as_strategy_shard_deals_them(monkeypatch, files, ranks, shuffle):
    """The ranks' batches are those of one rank, dealt; neither shard nor an Estimator deals again.

    A dataset of which every rank reads all is dealt by strategy.shard.
    """
    options = {"columns": ["id"], "batch_size": 2, "shuffle": shuffle, "epochs": 2}
    whole = ids(read(lambda: data.parquet(files, rank=0, ranks=1, **options)))
    monkeypatch.setattr(collectives, "size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for make in (
                lambda: data.parquet(files, **options),
                lambda: input_sharding.shard(data.parquet(files, **options).map(lambda b: b)),
                lambda: input_sharding.deal(data.parquet(files, **options).prefetch(1)),
                lambda: input_sharding.shard(data.parquet(files, rank=0, ranks=1, **options)),
            ):
                assert ids(read(make)) == whole[rank::ranks]
            first = ids(read(lambda: input_sharding.deal(data.parquet(files, **options), 3)))
        assert first == (whole[:3][rank::ranks] if ranks > 1 else whole)


def test_a_dataset_made_eagerly_is_not_dealt_again(monkeypatch, files):
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    with tf.init_scope():
        if not tf.executing_eagerly():
            pytest.skip("eager execution is off in this process")
        dataset = input_sharding.shard(data.parquet(files, ["id"], 2).prefetch(1))
        assert ids(dataset.as_numpy_iterator()) == [[2, 3], [6, 7], [10]]


@pytest.mark.parametrize(
    "start", [7, (1, 1), [1, 1], np.int64(7), np.int32([7])[0], np.array(7), (np.uint8(1), 1)]
)
def test_a_job_goes_on_where_another_of_other_ranks_stopped(files, start):
    """Two epochs of 6 batches; three ranks go on after 7 batches, of whichever number of ranks."""
    options = {"columns": ["id"], "batch_size": 2, "epochs": 2, "shuffle": True}
    whole = ids(read(lambda: data.parquet(files, **options)))
    assert len(whole) == 12
    rest = [
        ids(read(lambda r=rank: data.parquet(files, start=start, rank=r, ranks=3, **options)))
        for rank in range(3)
    ]
    assert rest == [whole[9::3], whole[7::3], whole[8::3]]


def test_records_after_the_end_have_no_batch(files):
    assert read(lambda: data.parquet(files, ["id"], 2, epochs=2, start=13)) == []


def test_missing_values_are_filled_or_named(tmp_path):
    lists = pyarrow.array([[1, None], None, [3]], pyarrow.list_(pyarrow.int32()))
    numbers = pyarrow.array([1.0, None, 3.0], pyarrow.float32())
    whole = write(tmp_path / "a", 0, 3)
    holes = write(tmp_path / "b", 3, 3, x=numbers, tags=lists)
    batches = read(lambda: data.parquet([holes], ["x", "tags"], missing={"x": -1, "tags": 7}))
    assert batches[0]["x"].tolist() == [1, -1, 3]
    assert batches[0]["tags"].to_list() == [[1, 7], [], [3]]
    for column in ("x", "tags"):
        message = f"/b, row group 0, column '{column}': [12] of . values are missing: fill them"
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            read(lambda c=column: data.parquet([whole, holes], [c], 3))
    with pytest.raises(ValueError, match="missing= names 'y', which is no column"):
        data.parquet(whole, missing={"y": 0})


FILLS = [
    ("int8", -128, -128),
    ("int64", np.int32(5), 5),
    ("uint64", 2**64 - 1, 2**64 - 1),
    ("float32", 16777217, 16777216.0),
    ("float64", np.float32(0.5), 0.5),
    ("float16", 3, 3.0),
    ("bool", np.bool_(True), True),
    ("string", "ü", "ü".encode()),
    ("string", b"\xff", b"\xff"),
]


@pytest.mark.parametrize("dtype, value, filled", FILLS)
def test_a_value_of_the_columns_type_stands_for_missing_ones(tmp_path, dtype, value, filled):
    column = pyarrow.array([None, None], getattr(pyarrow, dtype.replace("bool", "bool_"))())
    path = write(
        tmp_path / "a", 0, 2, y=column, z=pyarrow.array([[None], []], pyarrow.list_(column.type))
    )
    for missing in (value, {"y": value, "z": value}):
        (batch,) = read(lambda m=missing: data.parquet(path, ["y", "z"], missing=m))
        assert batch["y"].tolist() == [filled] * 2 and batch["z"].to_list() == [[filled], []]


BAD_FILLS = [
    ("id", "0", "int64, and takes a whole number from -9223372036854775808"),
    ("id", 0.5, "int64, and takes a whole"),
    ("id", True, "int64, and takes a whole"),
    ("id", 2**63, "int64, and takes a whole"),
    ("tags", 2**31, "lists of int32, and takes a whole"),
    ("x", "0", "float32, and takes a number that float32 can hold"),
    ("x", 1e300, "float32, and takes a number"),
    ("name", 0, "string, and takes a string"),
    ("flag", 1, "bool, and takes True or False"),
]


@pytest.mark.parametrize("column, value, message", BAD_FILLS)
def test_a_value_of_another_type_is_refused_when_the_dataset_is_made(
    tmp_path, column, value, message
):
    path = write(tmp_path / "a", 0, 2, flag=[True, False])
    whole = re.escape(f"missing={value!r}: column {column!r} is of {message}")
    for columns, missing in (([column], value), (None, {column: value})):
        with pytest.raises(ValueError, match=whole):
            data.parquet(path, columns, missing=missing)


def test_a_column_is_read_once(tmp_path, files):
    with pytest.raises(ValueError, match="columns= names 'x' 2 times: name it once"):
        data.parquet(files, ["x", "id", "x"])
    twice = pyarrow.table([[1], [2], [3]], names=["a", "b", "a"])
    pyarrow.parquet.write_table(twice, tmp_path / "c")
    for columns in (None, ["a"], ["b", "a"]):
        with pytest.raises(ValueError, match="/c: it has 2 columns named 'a': write the"):
            data.parquet(tmp_path / "c", columns)
    (batch,) = read(lambda: data.parquet(tmp_path / "c", ["b"]))
    assert batch["b"].tolist() == [2]


def test_blocks_of_deduplicated_values_are_restored(tmp_path):
    """As HybridBackend stores them: distinct values of a block, and for each record its number."""
    blocks = {
        "user": [[7, 9], [4], [5, 6]],
        "history": [[[1], [2, 3]], [[]], [[8], [9, 9]]],
        "user_index": [[0, 1, 0], [0, 0], [1, 0]],
        "item": [[10, 11, 12], [13, 14], [15, 16]],
    }
    pyarrow.parquet.write_table(pyarrow.table(blocks), tmp_path / "a")
    batches = read(
        lambda: data.parquet(
            tmp_path / "a", batch_size=2, deduplicate={"user_index": ["user", "history"]}
        )
    )
    assert list(batches[0]) == ["user", "history", "item"]
    assert [batch["user"].tolist() for batch in batches] == [[7, 9, 7, 4, 4], [6, 5]]
    assert batches[0]["history"].to_list() == [[1], [2, 3], [1], [], []]
    assert batches[1]["history"].to_list() == [[9, 9], [8]]
    assert [batch["item"].tolist() for batch in batches] == [[10, 11, 12, 13, 14], [15, 16]]
    with pytest.raises(ValueError, match="there is no column 'index'"):
        data.parquet(tmp_path / "a", deduplicate={"index": ["user"]})
    flat = write(tmp_path / "b", 0, 3)
    with pytest.raises(ValueError, match="column 'id' isn't one of lists"):
        data.parquet(flat, deduplicate={"tags": ["id"]})


WRONG_BLOCKS = {
    "number": (
        {"index": [[0, 0], [0, 2]]},
        "column index has the number 2 in .* user has length 2",
    ),
    "negative": ({"index": [[0, -1], [0, 0]]}, "the number -1 in .* user has length 1"),
    "no values": ({"user": [[], [7, 8]]}, "the number 0 in .* user has length 0"),
    "records": (
        {"item": [[1, 2], [3]]},
        "length 2 in column index, and of length 1 in column item",
    ),
    "indices": (
        {"other": [["a"], ["b"]], "other_index": [[0, 0], [0, 0, 0]]},
        "length 2 in column index, and of length 3 in column other_index",
    ),
}


@pytest.mark.parametrize("case", WRONG_BLOCKS)
def test_a_block_that_contradicts_itself_is_an_error(tmp_path, case):
    """Rather than records with a neighbouring block's values."""
    columns, message = WRONG_BLOCKS[case]
    blocks = {"user": [[4], [7, 8]], "index": [[0, 0], [1, 0]], "item": [[1, 2], [3, 4]], **columns}
    pyarrow.parquet.write_table(pyarrow.table(blocks), tmp_path / "a")
    deduplicate = {"index": ["user"]} | ({"other_index": ["other"]} if "other" in columns else {})
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        read(lambda: data.parquet(tmp_path / "a", deduplicate=deduplicate))


@pytest.mark.parametrize(
    "index, kind",
    [([[0.0], [0.0]], "lists of float64"), ([[[0]], [[0]]], "lists of lists of int64")],
)
def test_blocks_are_numbered_by_whole_numbers(tmp_path, index, kind):
    blocks = {"user": [[4], [7]], "index": index}
    pyarrow.parquet.write_table(pyarrow.table(blocks), tmp_path / "a")
    with pytest.raises(ValueError, match=f"column 'index' is an index of values, but of {kind}"):
        data.parquet(tmp_path / "a", deduplicate={"index": ["user"]})


def test_a_bad_file_among_good_ones_is_named_before_a_batch_is_read(tmp_path, files):
    """Every rank reads all footers, and so every rank has the error."""
    bad = tmp_path / "c.parquet"
    bad.write_bytes(Path(files[0]).read_bytes()[:-10])
    for content in (Path(files[0]).read_bytes()[:-10], b"", b"label\tI1\n0\t1\n", b"PAR1" * 5):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=r"c\.parquet: it is no Parquet file, or isn't whole"):
            data.parquet([*files, bad])
    bad.unlink()
    with pytest.raises(ValueError, match=r"c\.parquet: there is no such file"):
        data.parquet([*files, bad])
    write(bad, 0, 2, x=pyarrow.array([1, 2], pyarrow.int32()))
    message = r"c\.parquet, all row groups, column 'x': it is of int32, and of float32 in .*a\.par"
    with pytest.raises(ValueError, match=message):
        data.parquet([*files, bad])
    assert len(read(lambda: data.parquet([*files, bad], ["id"]))) == 1
    with pytest.raises(ValueError, match=r"a\.parquet: it has no column 'y': it has \['id'"):
        data.parquet(files, ["y"])
    with pytest.raises(ValueError, match="no column is named"):
        data.parquet(files, [])
    write(bad, 0, 2, day=pyarrow.array([1, 2], pyarrow.date32()))
    with pytest.raises(ValueError, match=r"c\.parquet: column 'day' is of type date32\[day\]"):
        data.parquet(bad)


def damage(path, group, column):
    """Overwrites a column of a row group; the footer stays as it was."""
    chunk = pyarrow.parquet.read_metadata(path).row_group(group).column(column)
    first = min(o for o in (chunk.dictionary_page_offset, chunk.data_page_offset) if o)
    with open(path, "r+b") as file:
        file.seek(first)
        file.write(b"\xff" * chunk.total_compressed_size)


def test_a_damaged_row_group_is_named_when_it_is_read_and_nothing_before_it_is_lost(files):
    damage(files[1], group=1, column=1)
    with tf.Graph().as_default():
        batch = tf.data.make_one_shot_iterator(data.parquet(files, batch_size=5)).get_next()
        with tf.Session() as session:
            assert session.run(batch)["id"].tolist() == [0, 1, 2, 3, 4]
            assert session.run(batch)["id"].tolist() == [5, 6, 7, 8, 9]
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=r"b\.parquet, row group 1, column 'x': "
            ):
                session.run(batch)


def test_a_file_that_changes_while_it_is_read_is_an_error(files):
    source = ParquetFiles(files, ["id"])
    write(files[0], 0, 7, rows=2)
    with pytest.raises(ValueError, match=r"a\.parquet, row group 0: .* and had 3 when reading"):
        source.read(0)


def test_files_are_listed_in_one_order(tmp_path, files):
    assert list_files(str(tmp_path)) == list_files(tmp_path / "*.parquet") == files
    assert list_files([files[1], tmp_path / "a*"]) == files[::-1]
    for nothing in ([], tmp_path / "no*"):
        with pytest.raises(ValueError, match="there are no Parquet files: "):
            list_files(nothing)


def test_options_that_cannot_be_are_refused(tmp_path, files):
    for name, value in (
        ("batch_size", 0),
        ("interleave", 0),
        ("epochs", 0),
        ("seed", -1),
        ("rank", 1),
        ("start", -1),
    ):
        with pytest.raises(ValueError, match=f"{name}="):
            data.parquet(files, **{"ranks": 1, "rank": 0, name: value})
    for start in ("3", 1.0, True, None, (1,), (0, 1, 2), (0, "1"), [True, 1], np.array([1, 2])):
        with pytest.raises(ValueError, match=r"start=.*: it is a whole number of batches, or \("):
            data.parquet(files, start=start)
    empty = write(tmp_path / "empty", 0, 0)
    with pytest.raises(ValueError, match="with 0 records: not a batch of"):
        data.parquet(empty, ["id"])


def test_a_warning_says_how_to_read_a_row_group_once(tmp_path):
    path = write(tmp_path / "a", 0, 64, rows=32)
    with tf.Graph().as_default():
        with pytest.warns(UserWarning, match="read by 16 ranks.*interleave=16"):
            data.parquet(path, ["id"], 2, rank=0, ranks=16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data.parquet(path, ["id"], 2, rank=0, ranks=16, interleave=16)
            data.parquet(path, ["id"], 2, rank=0, ranks=4)
            data.parquet(path, ["id"], 2, rank=1, ranks=16)


def test_numbers_are_views_of_what_was_read():
    array = pyarrow.array(np.arange(10), pyarrow.int64())
    column = column_of(pyarrow.field("id", array.type))
    (values,) = column.parts(column.without_missing(array, None).slice(2, 5))
    assert values.tolist() == [2, 3, 4, 5, 6]
    assert values.ctypes.data == array.buffers()[1].address + 16
    lists = pyarrow.array([[1], [2, 3], [], [4]], pyarrow.list_(pyarrow.int64()))
    column = column_of(pyarrow.field("tags", lists.type))
    values, splits = column.parts(column.without_missing(lists, None).slice(1, 3))
    assert values.tolist() == [2, 3, 4] and splits.tolist() == [0, 2, 2, 3]
    assert values.ctypes.data == lists.values.buffers()[1].address + 8


@pytest.mark.parametrize(
    "options, rank, ranks",
    [({}, 0, 1), ({"shuffle": True}, 0, 1), ({"interleave": 2, "shuffle": True}, 1, 2)],
)
def test_memory_is_bounded_by_row_groups(tmp_path, options, rank, ranks):
    """32 row groups of 2 MB are read; at most three are in memory, and a batch."""
    group, size = 1 << 18, 1 << 13
    table = pyarrow.table({"id": np.random.default_rng(1).integers(0, 2**62, 16 * group)})
    for name in "ab":
        pyarrow.parquet.write_table(
            table, tmp_path / name, row_group_size=group, compression="none", use_dictionary=False
        )
    del table
    source = ParquetFiles([str(tmp_path / name) for name in "ab"])
    order = RecordOrder([g.rows for g in source.groups], size, **options)
    reader = BatchReader(source, order, order.batches, ranks)
    before, count = pyarrow.total_allocated_bytes(), 0

    def row_groups_in_memory(below):
        """Returns how many there are, once they are fewer than `below` or a minute has passed: a
        thread that has read one holds it until it is scheduled again."""
        end = time.monotonic() + 60
        while (held := (pyarrow.total_allocated_bytes() - before) / group / 8) >= below:
            if time.monotonic() > end:
                break
            time.sleep(0.001)
        return held

    for number in range(rank, order.batches, ranks):
        (values,) = reader.read(number)
        count += len(values)
        # In addition to each row group, while it is read, its bytes as they are in the file.
        assert row_groups_in_memory(below=5) < 5
    assert count == 32 * group // ranks
    del values
    assert row_groups_in_memory(below=1) < 1


def test_rebatching_and_shuffling_after_it_hold_a_bounded_part(tmp_path):
    """tf.data's own, whose buffer is counted in records, after batches of another size."""
    path = write(tmp_path / "a", 0, 60, rows=20)
    make = lambda: data.parquet(path, ["id", "tags"], 7).unbatch().shuffle(5, seed=1).batch(4)  # noqa: E731
    batches = read(make)
    assert [len(batch["id"]) for batch in batches] == [4] * 15
    assert sorted(i for batch in batches for i in batch["id"]) == list(range(60))
    for batch in batches:
        assert batch["tags"].to_list() == [[i] * (i % 3) for i in batch["id"]]


def test_two_iterators_of_a_dataset_do_not_disturb_each_other(files):
    with tf.Graph().as_default():
        dataset = data.parquet(files, ["id"], 2, shuffle=True)
        both = [tf.data.make_one_shot_iterator(dataset).get_next() for _ in range(2)]
        with tf.Session() as session:
            for _ in range(6):
                first, second = session.run(both)
                assert first["id"].tolist() == second["id"].tolist()


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch, files):
    for module in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, module, None)
    sentence = r"needs pyarrow.*pip install 'collective-strategy\[data\]'"
    with pytest.raises(ImportError, match=sentence):
        data.parquet(files)
    with pytest.raises(ImportError, match="needs pyarrow"):
        arrow.module()


def test_pyarrow_is_imported_in_one_place_when_it_is_needed():
    """Scripts that read no Parquet don't wait for it, and don't need it."""
    for folder in ("data", "compat"):
        for file in (ROOT / "collective" / folder).rglob("*.py"):
            assert "import pyarrow" not in file.read_text(encoding="utf-8"), file


def test_files_of_fsspec(tmp_path, files):
    """fsspec reads them with the options that it was given, and lists patterns."""
    (tmp_path / "store").mkdir()
    object_store.register(tmp_path / "store")
    for path in files:
        tf.io.gfile.copy(path, f"objects://box/day/{Path(path).name}")
    options = {"batch_size": 2, "shuffle": True, "seed": 3, "rank": 0, "ranks": 1}
    expected = read(lambda: data.parquet(files, **options))
    batches = read(lambda: data.parquet("objects://box/*/*.parquet", **options))
    assert ids(batches) == ids(expected)
    assert [b["name"].tolist() for b in batches] == [b["name"].tolist() for b in expected]
    with pytest.raises(ValueError, match="objects://box/day/c.parquet: there is no such file"):
        data.parquet("objects://box/day/c.parquet", **options)


def test_files_of_fsspec_that_fail(tmp_path, files):
    (tmp_path / "store").mkdir()
    object_store.register(tmp_path / "store")
    tf.io.gfile.copy(files[0], "objects://box/a.parquet")
    source = ParquetFiles(["objects://box/a.parquet"])
    object_store.bring_down(ConnectionError("the service is down"), "open")
    try:
        with pytest.raises(ValueError, match="objects://box/a.parquet.*the service is down"):
            source.read(0)
        with pytest.raises(ValueError, match="objects://box/a.parquet.*the service is down"):
            ParquetFiles(["objects://box/a.parquet"])
    finally:
        object_store.bring_up()
