"""Batches are the same after they were packed, and travel; what isn't a packed batch is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import flight

from collective.data import Batch
from collective.data.batches import batch_dataset
from collective.data.batches.packed_batch import PackedBatch, pack
from collective.data.batches.ragged_ids import RaggedIds
from collective.data.streams import protocol

TYPES = [np.bool_, np.int8, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64]


@st.composite
def batches(draw):
    samples = draw(st.integers(1, 4))
    ids = {}
    for name in draw(st.sets(st.sampled_from("abc"))):
        sizes = [1] * samples
        if draw(st.booleans()):
            sizes = draw(st.lists(st.integers(0, 2), min_size=samples, max_size=samples))
        dtype = draw(st.sampled_from([np.int64, np.uint64]))
        least = 2**63 if dtype == np.uint64 else -(2**63)
        ids[name] = [np.arange(size, dtype=dtype) + dtype(least) for size in sizes]
        if dtype == np.uint64 and not sum(sizes):
            ids[name] = [np.zeros(0, np.int64)] * samples
    others = []
    for _ in range(2):
        of_role = {}
        for name in draw(st.sets(st.sampled_from("xyz"))):
            shape = (samples, *draw(st.sampled_from([(), (1,), (2, 3)])))
            values = np.arange(np.prod(shape)).reshape(shape)
            of_role[name] = values.astype(draw(st.sampled_from(TYPES)))
        others.append(of_role)
    if not (ids or others[0] or others[1]):
        others[0] = {"x": np.zeros(samples)}
    return Batch(ids, *others, meta=draw(st.binary(max_size=3)))


def assert_same(found: Batch, expected: Batch) -> None:
    assert found.meta == expected.meta and len(found) == len(expected)
    for role in ("ids", "dense", "labels"):
        values, others = getattr(found, role), getattr(expected, role)
        assert list(values) == list(others)
        for name, value in values.items():
            if role == "ids":
                assert value.to_list() == others[name].to_list()
                assert value.values.dtype == others[name].values.dtype
            else:
                assert value.dtype == others[name].dtype
                np.testing.assert_array_equal(value, others[name])


def travelled(packed: PackedBatch) -> PackedBatch:
    """Sends a batch over Flight."""

    class Server(flight.FlightServerBase):
        def do_get(self, context, ticket):
            return protocol.reply(protocol.BATCH, packed, samples=7)

    with Server("grpc+tcp://127.0.0.1:0") as server:
        with flight.connect(f"grpc+tcp://127.0.0.1:{server.port}") as client:
            about, found = protocol.read_reply(client.do_get(flight.Ticket(b"")))
    assert about == {"state": "batch", "samples": 7} and found is not None
    return found


@settings(deadline=None, max_examples=60)
@given(batches())
def test_a_packed_batch_is_the_batch(batch):
    packed = pack(batch)
    assert_same(packed.unpacked(), batch)
    arrays = batch.arrays()
    for found, expected in zip(packed.flat(), batch_dataset._Layout(arrays).packed(arrays)):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@settings(deadline=None, max_examples=60)
@given(batches(), st.integers(0, 4), st.integers(0, 4))
def test_a_part_has_the_samples_that_follow_each_other(batch, one, other):
    first, last = sorted(min(number, len(batch)) for number in (one, other))
    found = pack(batch, first, last).unpacked()
    ids = {}
    for name, value in batch.ids.items():
        rows = [value[sample] for sample in range(first, last)]
        splits = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        ids[name] = RaggedIds(np.concatenate([value.values[:0], *rows]), splits)
    dense, labels = (
        {name: array[first:last] for name, array in of_role.items()}
        for of_role in (batch.dense, batch.labels)
    )
    expected = Batch(ids, dense, labels, batch.meta)
    assert_same(found, expected)


@settings(deadline=None, max_examples=15)
@given(batches())
def test_it_travels(batch):
    found = travelled(pack(batch))
    assert_same(found.unpacked(), batch)
    assert found.layout == pack(batch).layout


def test_row_splits_of_single_ids_do_not_travel():
    many = {f"c{k}": np.arange(1000) for k in range(20)}
    packed = pack(Batch(ids=many))
    assert sum(array.nbytes for array in packed.arrays) == 20 * 8000
    assert_same(packed.unpacked(), Batch(ids=many))
    # One id each on average isn't one id each.
    uneven = Batch(ids={"c": [[1, 2], [], [3]]})
    assert sum(array.nbytes for array in pack(uneven).arrays) == 8 * (3 + 4)


GOOD = pack(Batch(ids={"c": [[1, 2], []]}, dense={"x": np.zeros(2, np.float32)}))


@pytest.mark.parametrize(
    "change",
    [
        {"layout": b"[]"},
        {"layout": b"no JSON"},
        {"layout": b'[["ids", "c", "O", []], ["dense", "x", "<f4", []]]'},
        {"layout": b'[["ids", "c", "<i8", []], ["dense", "x", "<f8", []]]'},
        {"layout": b'[["dense", "x", "<f4", []], ["ids", "c", "<i8", []]]'},
        {"counts": np.array([2, 3])},
        {"counts": np.array([2, 3, 3])},
        {"counts": np.array([3, -2, 2])},
        {"counts": np.array([2, 3, -1])},
        {"arrays": GOOD.arrays[:1]},
        {"arrays": GOOD.arrays[::-1]},
    ],
)
def test_arrays_that_a_layout_does_not_describe_are_refused(change):
    fields = {"layout": GOOD.layout, "counts": GOOD.counts, "arrays": GOOD.arrays}
    with pytest.raises(ValueError, match="a packed batch has"):
        PackedBatch(**(fields | change))
