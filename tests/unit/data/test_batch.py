"""A batch holds what it was made of, is checked once, and comes back whole from its bytes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from collective.data import Batch, RaggedIds

TYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
TYPES += ["float16", "float32", "float64"]


def example() -> Batch:
    return Batch(
        ids={"user": np.array([7, 2**64 - 1], np.uint64), "seen": [[1, 2, 3], []]},
        dense={"age": np.array([[31.0, 1], [42.0, 2]], np.float32), "is": [True, False]},
        labels={"click": np.array([1, 0], np.int8)},
        meta=b"day\x00 1",
    )


def same(found: Batch, expected: Batch) -> None:
    assert (found.meta, len(found)) == (expected.meta, len(expected))
    assert list(found.ids) == list(expected.ids)
    for name, ids in expected.ids.items():
        assert found.ids[name].values.dtype == ids.values.dtype
        assert found.ids[name].to_list() == ids.to_list()
    for role in ("dense", "labels"):
        assert list(getattr(found, role)) == list(getattr(expected, role))
        for name, array in getattr(expected, role).items():
            other = getattr(found, role)[name]
            assert (other.dtype, other.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(other, array)


@pytest.mark.parametrize(
    "value, rows, dtype",
    [
        (np.array([3, 4], np.int32), [[3], [4]], np.int64),
        (np.array([3, 4], np.uint16), [[3], [4]], np.int64),
        (np.array([3, 2**64 - 1], np.uint64), [[3], [2**64 - 1]], np.uint64),
        (np.array([[3, 4], [5, -6]], ">i8"), [[3, 4], [5, -6]], np.int64),
        ([3, 4], [[3], [4]], np.int64),
        ([3, 2**63], [[3], [2**63]], np.uint64),
        ([[3], []], [[3], []], np.int64),
        ([[], []], [[], []], np.int64),
        ([[1], [2**63, 5]], [[1], [2**63, 5]], np.uint64),
        ([np.array([3], np.uint64), np.zeros(0, np.uint64)], [[3], []], np.uint64),
        ((np.array([3]), (4, 5)), [[3], [4, 5]], np.int64),
        (RaggedIds(np.array([3, 4]), np.array([0, 0, 2])), [[], [3, 4]], np.int64),
        (tf.ragged.constant([[3, 4], []], dtype=tf.int64), [[3, 4], []], np.int64),
        (tf.ragged.constant([[3, 4], []], dtype=tf.uint64), [[3, 4], []], np.uint64),
        (
            tf.compat.v1.ragged.RaggedTensorValue(np.array([3, 4]), np.array([0, 2, 2])),
            [[3, 4], []],
            np.int64,
        ),
        (tf.sparse.from_dense([[0, 3], [0, 0], [4, 5]]), [[3], [], [4, 5]], np.int64),
        (tf.compat.v1.SparseTensorValue([[1, 7]], np.array([3]), [2, 9]), [[], [3]], np.int64),
        (tf.constant([[3, 4]], tf.int64), [[3, 4]], np.int64),
        (pa.array([3, 4], pa.uint64()), [[3], [4]], np.uint64),
        (pa.array([[3, 4], []], pa.list_(pa.int32())), [[3, 4], []], np.int64),
        (pa.array([[9], [3, 4], []], pa.large_list(pa.int64()))[1:], [[3, 4], []], np.int64),
        (pa.array([[9, 9], [3, 4]], pa.list_(pa.int64(), 2))[1:], [[3, 4]], np.int64),
        (pa.chunked_array([[[3]], [[4, 5]]]), [[3], [4, 5]], np.int64),
        (pa.chunked_array([], pa.list_(pa.int64())), [], np.int64),
    ],
)
def test_ids_of_any_form(value: Any, rows: list[list[int]], dtype: Any):
    ids = Batch(ids={"a": value}).ids["a"]
    assert (ids.to_list(), ids.values.dtype) == (rows, dtype)
    assert [ids[sample].tolist() for sample in range(-len(ids), 0)] == rows


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({}, ValueError, "neither ids nor"),
        ({"ids": [1]}, TypeError, "dict by name, not list"),
        ({"ids": {1: [1]}}, TypeError, "a name is text, and not empty, not 1"),
        ({"dense": {"": [1]}}, TypeError, "not ''"),
        ({"ids": {"a": [1.5]}}, TypeError, r"ids\['a'\]: ids are integers .* not float64"),
        ({"ids": {"a": [True]}}, TypeError, "not bool"),
        ({"ids": {"a": [[1], [2.0]]}}, TypeError, r"ids\['a'\], sample 1: .* not float64"),
        ({"ids": {"a": [[[1]]]}}, ValueError, "sample 0 has shape"),
        ({"ids": {"a": 7}}, ValueError, r"not of shape \(\)"),
        ({"ids": {"a": [-1, 2**63]}}, ValueError, "from -1 to 9223372036854775808 fit neither"),
        ({"ids": {"a": [[-1], [2**63]]}}, TypeError, "some have negative ids"),
        ({"ids": {"a": [2**64]}}, ValueError, "fit neither"),
        ({"ids": {"a": ["x"]}}, TypeError, "not <U1"),
        ({"ids": {"a": [None]}}, TypeError, "not object"),
        ({"ids": {"a": np.zeros(0)}}, TypeError, "not float64"),
        ({"ids": {"a": pa.array([1, None])}}, ValueError, "values are missing, 1 of 2"),
        ({"ids": {"a": pa.array([[1, None]])}}, ValueError, "values are missing, 1 of 2"),
        ({"ids": {"a": pa.array(["x"])}}, TypeError, "a column of string"),
        ({"dense": {"x": pa.array([[1.0]])}}, TypeError, "a column of list"),
        ({"dense": {"x": ["a"]}}, TypeError, r"dense\['x'\]: these are numbers"),
        ({"dense": {"x": [[1], [2, 3]]}}, ValueError, "no array can be made"),
        ({"dense": {"x": np.zeros((2, 0))}}, ValueError, r"not \(2, 0\)"),
        ({"dense": {"x": 1.0}}, ValueError, r"not \(\)"),
        ({"labels": {"y": np.zeros(2, np.complex64)}}, TypeError, "not complex64"),
        ({"ids": {"a": [1, 2]}, "labels": {"y": [1.0]}}, ValueError, "1 sample, and .* 2 samples"),
        ({"dense": {"x": [1.0, np.inf]}, "finite": True}, ValueError, "sample 1: inf"),
        ({"dense": {"x": [[1.0, np.nan]]}, "finite": True}, ValueError, r"sample 0: \[1.0, nan\]"),
        ({"ids": {"a": [1]}, "meta": "text"}, TypeError, "meta=…. is bytes, not str"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        Batch(**arguments)


def test_a_tensor_of_a_graph_is_refused():
    with tf.Graph().as_default():
        with pytest.raises(TypeError, match="Take a tensor of a graph from session.run"):
            Batch(dense={"x": tf.constant([1.0])})


@pytest.mark.parametrize("splits", [[], [0], [1, 2], [0, 3], [0, 2, 1, 2], [0, 1]])
def test_splits_divide_the_values(splits: list[int]):
    with pytest.raises(ValueError, match="don't divide 2 values"):
        RaggedIds(np.array([1, 2]), np.array(splits, np.int64))


def test_arrays_are_not_copied():
    user, x = np.array([1, 2]), np.array([1.0, 2.0])
    batch = Batch(ids={"user": user}, dense={"x": x})
    assert np.shares_memory(batch.ids["user"].values, user)
    assert np.shares_memory(batch.dense["x"], x)


# ---- From columns

TABLE = pa.table(
    {
        "u": [[1, 2], [], [3]],
        "x": [1.0, 2.0, 3.0],
        "y": pa.array([[1, 2]] * 3, pa.list_(pa.int8(), 2)),
    }
)


def test_columns_of_tables_dicts_and_files(tmp_path):
    whole = Batch.of(TABLE, ids=["u"], dense=["x", "y"], meta=b"m")
    assert whole.ids["u"].to_list() == [[1, 2], [], [3]]
    assert whole.dense["y"].tolist() == [[1, 2]] * 3 and whole.meta == b"m"
    same(Batch.of(TABLE.to_batches()[0], ids=["u"], dense=["x", "y"], meta=b"m"), whole)
    element = next(
        tf.data.Dataset.from_tensor_slices(
            {"u": tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64), "x": [1.0, 2.0, 3.0]}
        )
        .batch(3)
        .as_numpy_iterator()
    )
    assert Batch.of(element, ids=["u"], dense=["x"]).ids["u"].to_list() == [[1, 2], [], [3]]
    pyarrow.parquet.write_table(TABLE, tmp_path / "a.parquet")
    batches = list(Batch.from_parquet(tmp_path / "a.parquet", 2, ids=["u"], labels=["x"]))
    assert [batch.ids["u"].to_list() for batch in batches] == [[[1, 2], []], [[3]]]
    assert [batch.labels["x"].tolist() for batch in batches] == [[1.0, 2.0], [3.0]]


def test_wrong_columns_and_files_are_named(tmp_path):
    with pytest.raises(KeyError, match="no column 'uu'. Did you mean 'u'"):
        Batch.of(TABLE, ids=["uu"])
    with pytest.raises(TypeError, match="a list of names, not 'u'"):
        Batch.of(TABLE, ids="u")
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(TABLE, path)
    with pytest.raises(KeyError, match="no column 'z'"):
        next(Batch.from_parquet(path, ids=["z"]))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="a.parquet: it can't be read as Parquet"):
        next(Batch.from_parquet(path, ids=["u"]))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        next(Batch.from_parquet(tmp_path / "nowhere.parquet", ids=["u"]))


# ---- Bytes


def test_other_arrow_libraries_read_the_bytes():
    table = pa.ipc.open_stream(example().to_bytes()).read_all()
    assert table.column_names == ["ids/user", "ids/seen", "dense/age", "dense/is", "labels/click"]
    assert table["ids/seen"].to_pylist() == [[1, 2, 3], []]
    assert table["ids/user"].to_pylist() == [[7], [2**64 - 1]]
    assert table["dense/age"].to_pylist() == [[31.0, 1.0], [42.0, 2.0]]


names = st.text(min_size=1, max_size=4)


@st.composite
def drawn_batches(draw: Any) -> Batch:
    size = draw(st.integers(0, 4))

    def array() -> Any:
        shape = (size, *draw(st.lists(st.integers(1, 3), max_size=2)))
        return draw(arrays.arrays(draw(st.sampled_from(TYPES)), shape))

    def rows() -> RaggedIds:
        lengths = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        splits = np.cumsum([0, *lengths], dtype=np.int64)
        dtype = draw(st.sampled_from([np.int64, np.uint64]))
        return RaggedIds(draw(arrays.arrays(dtype, int(splits[-1]))), splits)

    ids = {name: rows() for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))}
    dense = {name: array() for name in draw(st.lists(names, max_size=2, unique=True))}
    labels = {name: array() for name in draw(st.lists(names, max_size=2, unique=True))}
    return Batch(ids, dense, labels, draw(st.binary(max_size=9)))


@pytest.mark.slow
@hypothesis.given(drawn_batches())
@hypothesis.settings(deadline=None)
def test_any_batch_comes_back_from_its_bytes(batch: Batch):
    same(Batch.from_bytes(batch.to_bytes()), batch)


@hypothesis.given(drawn_batches(), st.data())
@hypothesis.settings(deadline=None)
def test_less_or_more_than_its_bytes_is_refused(batch: Batch, data: Any):
    whole = batch.to_bytes()
    cut = data.draw(st.integers(1, len(whole) - 1))
    for part in (b"", whole[:cut], whole + b"\0", whole[:cut] + whole):
        with pytest.raises(ValueError, match="these aren't the bytes of a Batch"):
            Batch.from_bytes(part)


@hypothesis.given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4))
@hypothesis.settings(deadline=None)
def test_changed_bytes_are_a_batch_or_refused(changes: list[tuple[int, int]]):
    changed = bytearray(example().to_bytes())
    for place, value in changes:
        changed[place % len(changed)] = value
    try:
        found = Batch.from_bytes(bytes(changed))
    except (ValueError, TypeError):
        return
    assert {len(value) for value in (*found.ids.values(), *found.dense.values())} <= {len(found)}
    assert found.to_bytes()


@pytest.mark.parametrize("data", [None, "text", 7])
def test_only_buffers_are_read(data: Any):
    with pytest.raises(TypeError, match="a batch is read from bytes, not"):
        Batch.from_bytes(data)


def test_streams_of_others_are_refused():
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TABLE.schema) as stream:
        stream.write_table(TABLE)
    with pytest.raises(ValueError, match="the schema has no 'collective.batch'"):
        Batch.from_bytes(sink.getvalue())


# ---- Tensors


def test_values_for_a_session_are_int64_of_the_same_bits():
    found = example().arrays()
    assert found["ids"]["user"].values.tolist() == [7, -1]
    assert found["ids"]["user"].values.dtype == np.int64
    assert found["dense"]["age"].shape == (2, 2)


def test_a_feed_is_like_its_placeholders():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        places = example().placeholders()
        assert places["dense"]["age"].shape.as_list() == [None, 2]
        sums = tf.reduce_sum(places["ids"]["seen"], axis=1)
        assert session.run(sums, example().feed(places)).tolist() == [6, 0]
        other = Batch(ids={"user": [1]}, dense={"age": np.zeros((1, 3), np.float32)})
        with pytest.raises(ValueError, match=r"\['age'\] is float32 \[B, 3\] instead of .*B, 2\]"):
            other.feed(places)


def test_a_dataset_reads_batches_again_for_each_iteration():
    batches = [example(), example()]
    for source in (batches, lambda: iter(batches)):
        dataset = Batch.dataset(source)
        for _ in range(2):
            elements = list(dataset)
            assert [e["ids"]["seen"].to_list() for e in elements] == [[[1, 2, 3], []]] * 2
            assert elements[0]["ids"]["user"].to_list() == [[7], [-1]]
            assert elements[0]["labels"]["click"].numpy().tolist() == [1, 0]
    with pytest.raises(TypeError, match="an iterator is empty after the first one"):
        Batch.dataset(iter(batches))
    with pytest.raises(ValueError, match="there are no batches"):
        Batch.dataset([])
    assert list(Batch.dataset([], like=example())) == []


def test_a_loader_needs_no_tensorflow():
    program = (
        "import sys\nfrom collective.data import Batch\n"
        "Batch.from_bytes(Batch(ids={'a': [[1], []]}).to_bytes())\n"
        "print('tensorflow' in sys.modules)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert out.stdout == "False\n"
