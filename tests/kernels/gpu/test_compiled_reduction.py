"""Checks the compiled operation that sums gradients by row, by kernels: see
`test_compiled_operations.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective.ops import native_library
from collective.ops.exchange import dispatch, embedding_bag
from collective.ops.gpu import occurrences, segments, sums
from tests.gpu_double import driver
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

DIMS = (4, 3, 16, 1)
SECTION_TABLES = (1, 0, 3, 2, 1)
ROWS, SCALE = 9, 0.25
COUNTS = np.array([[5, 0, 70, 2, 3], [0, 1, 3, 40, 9]])


class Reduced:
    """Builds a reduction of several tables by messages of several ranks.

    Args:
        counts: [N, S] keys.
        most: rows that occur.
    """

    def __init__(self, counts: np.ndarray = COUNTS, most: int = ROWS, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.numbers = [[rng.integers(0, most, count) for count in of_rank] for of_rank in counts]
        self.gradients = [
            [
                rng.standard_normal((count, DIMS[table])).astype(np.float32)
                for table, count in zip(SECTION_TABLES, of_rank)
            ]
            for of_rank in counts
        ]
        words = [
            np.concatenate([np.stack([one, one], 1).reshape(-1), *keys])
            for one, keys in zip(counts, self.numbers)
        ]
        flat = np.concatenate([one.reshape(-1) for of in self.gradients for one in of])
        self.gradient = tf.placeholder_with_default(flat, [None])
        self.message = tf.placeholder_with_default(np.concatenate(words).astype(np.int64), [None])
        self.splits = tf.constant([len(one) for one in words], tf.int32)
        self.rows = [
            tf.placeholder_with_default(self.of_table(t, self.numbers, np.int64), [None])
            for t in range(len(DIMS))
        ]
        self.tables = [
            tf.get_variable(f"table{t}", [most, dim], use_resource=True)
            for t, dim in enumerate(DIMS)
        ]
        self.inputs = (
            self.gradient,
            [table.handle for table in self.tables],
            self.rows,
            self.message,
            self.splits,
        )
        self.headers = [tf.constant(np.stack([counts, counts], 2).reshape(-1), tf.int64)]
        self.attributes = {
            "ranks": len(counts),
            "section_tables": SECTION_TABLES,
            "kinds": [embedding_bag.STATIC] * len(DIMS),
            "dims": [DIMS[table] for table in SECTION_TABLES],
            "pooled": [False] * len(SECTION_TABLES),
            "weighted": [False] * len(SECTION_TABLES),
            "max_norms": [0.0] * len(SECTION_TABLES),
            "shapes": [table.shape for table in self.tables],
            "scale": SCALE,
        }

    def of_table(self, t: int, by_section: Any, dtype: Any) -> np.ndarray:
        """Joins what all ranks have of a table."""
        return np.concatenate(
            [one for of in by_section for one, table in zip(of, SECTION_TABLES) if table == t]
        ).astype(dtype)

    def outputs(self) -> list[tf.Tensor]:
        values, indices, inverse = dispatch.operations().collective_reduce_rows(
            *self.inputs, self.headers, **self.attributes
        )
        return [*values, *indices, *inverse]

    def on_cpu(self) -> list[tf.Tensor]:
        values, indices, inverse = native_library.library().collective_reduce_rows(
            *self.inputs, [], **self.attributes
        )
        return [*values, *indices, *inverse]

    def wanted(self) -> list[np.ndarray]:
        """Computes the outputs in float64."""
        values, indices, inverses = [], [], []
        for t, dim in enumerate(DIMS):
            rows = self.of_table(t, self.numbers, np.int64)
            gradients = self.of_table(t, self.gradients, np.float64).reshape(-1, dim)
            distinct = list(dict.fromkeys(rows.tolist()))
            inverse = np.array([distinct.index(row) for row in rows], np.int32)
            summed = np.zeros((len(distinct), dim))
            np.add.at(summed, inverse, SCALE * gradients)
            values.append(summed)
            indices.append(np.array(distinct, np.int64))
            inverses.append(inverse)
        return [*values, *indices, *inverses]


def close(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(got) == len(wanted)
    for number, (one, other) in enumerate(zip(got, wanted)):
        assert one.shape == other.shape, number
        np.testing.assert_allclose(one, other, 1e-4, 1e-5, err_msg=str(number))


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.usefixtures("bound")
def test_gradients_are_summed_by_row(stand_in: driver.StandIn, delays: bool):
    """As NumPy and the CPU's operation do, also where nothing is done before somebody waits."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Reduced()
        outputs, on_cpu = made.outputs(), made.on_cpu()
        assert outputs[0].op.type == "CollectiveReduceRows"
        assert outputs[0].shape.as_list() == [None, DIMS[0]]
        stand_in.delays = delays
        got = session.run(outputs)
        close(got, made.wanted())
        close(got, session.run(on_cpu))
    assert stand_in.launches == [
        "copy_keys",
        "distinct_insert",
        "distinct_count",
        "partition_scan",
        "distinct_number",
        "distinct_inverse",
        "copy_keys",
        "copy_numbers",
        "occurrences_count",
        "partition_scan",
        "occurrences_place",
        "occurrences_offsets",
        "occurrences_split",
        "sum_pieces",
        "sum_rows",
        "sum_rows_long",
    ]
    assert not stand_in.queued
    assert stand_in.calls.count("copy_to_device") == 2, "before sizes are known, and after"
    assert stand_in.calls.count("wait_for_event") == 1, "for how many rows are distinct"


@pytest.mark.usefixtures("bound")
def test_few_keys_need_no_pieces(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Reduced(np.minimum(COUNTS, 3))
        close(session.run(made.outputs()), made.wanted())
    assert stand_in.launches[-1] == "sum_rows"


@pytest.mark.usefixtures("bound")
def test_no_keys(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Reduced(0 * COUNTS)
        close(session.run(made.outputs()), made.wanted())
    assert stand_in.launches == []


@pytest.mark.usefixtures("bound")
def test_a_row_that_occurs_often(stand_in: driver.StandIn):
    """Its sum is made in pieces."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Reduced(np.array([[700, 0, 1, 0, 600]]), most=2)
        for one, other in zip(session.run(made.outputs()), made.wanted()):
            np.testing.assert_allclose(one, other, 1e-3, 1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_that_of_python(
    monkeypatch: pytest.MonkeyPatch, stand_in: driver.StandIn, seed: int
):
    """Word by word, except for the addresses: of keys, occurrences and sums."""
    bind(EmulatedBridge(), monkeypatch)
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 3, (3, 5)) * rng.integers(1, 900, (3, 5)) + 1
    with tf.Graph().as_default(), tf.Session() as session:
        made = Reduced(counts, most=500, seed=seed)
        session.run(made.outputs())
    first, second = (np.frombuffer(uploaded, np.int64) for uploaded in stand_in.uploads)
    wanted, keys = made.wanted(), [len(made.of_table(t, made.numbers, int)) for t in range(4)]
    by_table = segments.Segments.of(keys, range(4))
    plan = segments.plan(by_table, [segments.STATIC] * 4)
    np.testing.assert_array_equal(first[:28].reshape(4, 7), plan.segments)
    np.testing.assert_array_equal(first[28:31].view(np.uint32)[:5], plan.section_tiles)
    assert len(first) == 31 + 4 * 5, "and the parts of the keys"

    distinct, total = [len(one) for one in wanted[4:8]], sum(keys)
    second = second[2 * 4 * 5 :]  # after the parts of keys and of the inverse
    tiles = -(-total // occurrences.SORT_TILE)
    np.testing.assert_array_equal(second[:1].view(np.uint32), [0, tiles])
    pieces = [
        (made.gradients[rank][s].size, table, made.gradients[rank][s].shape)
        for rank in range(3)
        for s, table in enumerate(SECTION_TABLES)
    ]
    starts = np.cumsum([size for size, *_ in pieces]) - [size for size, *_ in pieces]
    order = np.argsort([table for _, table, _ in pieces], kind="stable")
    runs = sums.Rows(
        4 * starts[order],
        np.array([pieces[i][2][0] for i in order]),
        np.array([pieces[i][2][1] for i in order]),
    ).words()
    end = 2 + 3 * len(runs)
    got = second[2:end].reshape(-1, 3)
    np.testing.assert_array_equal(got - [0, 0, got[0, 2] - runs[0, 2]], runs)
    assert second[end + 1] == occurrences.most_pieces(total)
    targets, _ = sums.target_words(
        segments.Segments.of(distinct, range(4)),
        np.array(DIMS),
        np.zeros((4, 4), np.int64),
        np.array(distinct),
        4,
    )
    targets[:, -1] = len(runs)
    got = second[end + 3 :].reshape(-1, 13)
    np.testing.assert_array_equal(np.delete(got, 5, 1), np.delete(targets, 5, 1))


def test_each_call_of_the_driver_may_fail(bound: Any, stand_in: driver.StandIn):
    """Then the operation fails, nothing of it is under way after it, and the next one works."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Reduced(np.minimum(COUNTS, 3))
        outputs = made.outputs()
        session.run(outputs)
        stand_in.reset()
        session.run(outputs)
        names = list(stand_in.calls)
        assert len(names) > 20
        for number, name in enumerate(names, 1):
            stand_in.reset()
            stand_in.delays, stand_in.fails_at = True, number
            if name == "destroy_event":
                session.run(outputs)
                continue
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu"):
                session.run(outputs)
            if name != "wait_for_stream":  # on a GPU, the stream itself keeps what is left in order
                assert not stand_in.queued
        stand_in.reset()
        close(session.run(outputs), made.wanted())


@pytest.mark.usefixtures("bound", "stand_in")
def test_what_cannot_be_is_refused():
    with tf.Graph().as_default(), tf.Session() as session:
        made = Reduced()
        outputs = made.outputs()
        for feed, words in (
            ({made.rows[1]: [1, 2]}, "the ranks asked for 17 rows of table 1, but 2 row numbers"),
            ({made.gradient: np.ones(5)}, "the gradient has 5 elements, but the ranks asked for"),
            ({made.message: np.zeros(4)}, "message of rank 0 is malformed"),
        ):
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                session.run(outputs, feed)


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
def test_a_gpu_has_the_kernel():
    found = kernels.get_registered_kernels_for_op("CollectiveReduceRows").kernel
    (one,) = [kernel for kernel in found if kernel.device_type == "GPU"]
    assert sorted(one.host_memory_arg) == ["handles", "headers", "splits"] and not one.label
