"""Checks compiled operations that launch kernels themselves, by the emulator's in the place of a
GPU's and by a stand-in for CUDA's driver.

The stand-in can delay all that is launched until it is waited for, and can let one call fail.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective.ops import native_library
from collective.ops.exchange import dispatch, embedding_bag
from collective.ops.gpu import gather
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.workspace import Workspace
from tests.gpu_double import driver
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator import EmulatedDevice
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

DIMS = (4, 3, 16, 1)
SECTION_TABLES = (1, 0, 3, 2)
ROWS = 9


class Gathered:
    """Builds a gather of several tables by messages of several ranks.

    Args:
        counts: [N, S] keys.
    """

    def __init__(self, counts: np.ndarray, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.values = [rng.standard_normal((ROWS, dim)).astype(np.float32) for dim in DIMS]
        self.numbers = [[rng.integers(0, ROWS, count) for count in of_rank] for of_rank in counts]
        self.tables = [
            tf.get_variable(f"table{t}", initializer=one, use_resource=True)
            for t, one in enumerate(self.values)
        ]
        words = [
            np.concatenate([np.stack([one, one], 1).reshape(-1), *keys])
            for one, keys in zip(counts, self.numbers)
        ]
        self.message = tf.placeholder_with_default(np.concatenate(words).astype(np.int64), [None])
        self.splits = tf.placeholder_with_default([len(one) for one in words], [len(words)])
        self.rows = [
            tf.placeholder_with_default(np.concatenate(of_table).astype(np.int64), [None])
            for of_table in self.by_table()
        ]
        self.headers = np.stack([counts, counts], 2).astype(np.int64)
        self.flat = embedding_bag.gather(
            [table.handle for table in self.tables],
            self.rows,
            self.message,
            self.splits,
            [embedding_bag.Section(table, DIMS[table]) for table in SECTION_TABLES],
            [embedding_bag.STATIC] * len(DIMS),
            len(counts),
            [table.shape for table in self.tables],
            headers=[tf.constant(self.headers.reshape(-1))],
        )

    def by_table(self) -> list[list[np.ndarray]]:
        return [
            [keys[s] for keys in self.numbers for s, of in enumerate(SECTION_TABLES) if of == t]
            for t in range(len(DIMS))
        ]

    def wanted(self) -> np.ndarray:
        """Computes what the operation returns, key by key."""
        return np.concatenate(
            [
                self.values[table][row]
                for keys in self.numbers
                for table, of_section in zip(SECTION_TABLES, keys)
                for row in of_section
            ]
        )


COUNTS = np.array([[5, 0, 70, 2], [0, 1, 3, 40]])


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.usefixtures("bound")
def test_rows_are_gathered(stand_in: driver.StandIn, delays: bool):
    """By one kernel, also where nothing is done before somebody waits for it."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Gathered(COUNTS)
        assert made.flat.op.type == "CollectiveGatherRows"
        session.run(tf.global_variables_initializer())
        stand_in.reset()
        stand_in.delays = delays
        np.testing.assert_array_equal(session.run(made.flat), made.wanted())
    assert stand_in.launches == ["gather_rows"] and not stand_in.queued
    assert stand_in.calls.count("copy_to_device") == 1, "all that kernels need, in one piece"
    assert "wait_for_event" not in stand_in.calls and "copy_to_host" not in stand_in.calls


@pytest.mark.usefixtures("bound")
def test_a_plan_stays_until_it_was_copied(stand_in: driver.StandIn):
    """Another operation uploads its own while nothing of the first has been done yet."""
    # A run within a run takes a second thread, which the process may not have.
    threads = tf.ConfigProto(inter_op_parallelism_threads=3, use_per_session_threads=True)
    with tf.Graph().as_default(), tf.Session(config=threads) as session:
        first = Gathered(COUNTS)
        with tf.variable_scope("second"):
            second = Gathered(COUNTS[::-1], seed=1)
        session.run(tf.global_variables_initializer())
        for one in (first, second):
            np.testing.assert_array_equal(session.run(one.flat), one.wanted())
        of_second = []

        def run_second(name: str) -> None:
            if name == "wait_for_stream" and not of_second:
                of_second.append(None)
                of_second[0] = session.run(second.flat)

        stand_in.reset()
        stand_in.delays, stand_in.interrupts = True, run_second
        of_first = session.run(first.flat)
        np.testing.assert_array_equal(of_first, first.wanted())
        np.testing.assert_array_equal(of_second[0], second.wanted())
        assert stand_in.calls.count("create_event") == 1, "a buffer next to the existing one"


@pytest.mark.usefixtures("bound")
def test_plans_share_memory_one_after_the_other(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Gathered(COUNTS)
        session.run(tf.global_variables_initializer())
        session.run(made.flat)
        stand_in.reset()
        for _ in range(20):
            session.run(made.flat)
        assert "create_event" not in stand_in.calls and "destroy_event" not in stand_in.calls


@pytest.mark.usefixtures("bound")
def test_nothing_is_gathered(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Gathered(np.zeros((2, 4), np.int64))
        session.run(tf.global_variables_initializer())
        assert session.run(made.flat).shape == (0,)
    assert stand_in.launches == []


@pytest.mark.usefixtures("bound")
def test_rows_outside_of_a_table_are_zeros():
    with tf.Graph().as_default(), tf.Session() as session:
        made = Gathered(np.array([[2, 0, 0, 0]]))
        session.run(tf.global_variables_initializer())
        dim = DIMS[SECTION_TABLES[0]]
        for outside in (-1, ROWS):
            got = session.run(made.flat, {made.rows[SECTION_TABLES[0]]: [outside, 4]})
            wanted = [np.zeros(dim), made.values[SECTION_TABLES[0]][4]]
            np.testing.assert_array_equal(got, np.concatenate(wanted))


def test_the_plan_is_that_of_python(monkeypatch: pytest.MonkeyPatch, stand_in: driver.StandIn):
    """Word by word, except for the addresses."""
    bind(EmulatedBridge(), monkeypatch)
    device, rng = EmulatedDevice(), np.random.default_rng(1)
    for trial in range(3):
        counts = rng.integers(0, 3, (3, 4)) * rng.integers(1, 400, (3, 4))
        with tf.Graph().as_default(), tf.Session() as session:
            made = Gathered(counts, trial)
            session.run(tf.global_variables_initializer())
            stand_in.reset()
            session.run(made.flat)
        (uploaded,) = stand_in.uploads
        wanted, _, _ = gather._pieces(
            [device.empty(value.shape, np.float32) for value in made.values],
            device.empty(int(counts.sum()), np.int64),
            Segments.of(counts.reshape(-1), SECTION_TABLES * 3),
            Workspace(device),
        )
        got, addresses = np.frombuffer(uploaded, np.int64).reshape(-1, 9), [1, 3]
        np.testing.assert_array_equal(np.delete(got, addresses, 1), np.delete(wanted, addresses, 1))


@pytest.mark.usefixtures("bound")
def test_each_call_of_the_driver_may_fail(stand_in: driver.StandIn):
    """Then the operation fails, nothing of it is under way after it, and the next one works."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Gathered(COUNTS)
        session.run(tf.global_variables_initializer())
        session.run(made.flat)
        stand_in.reset()
        session.run(made.flat)
        names = list(stand_in.calls)
        assert len(names) >= 3
        for number, name in enumerate(names, 1):
            stand_in.reset()
            stand_in.delays, stand_in.fails_at = True, number
            if name == "destroy_event":
                session.run(made.flat)
                continue
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu"):
                session.run(made.flat)
            assert stand_in.fails_at is not None and len(stand_in.calls) >= number
            if name != "wait_for_stream":  # on a GPU, the stream itself keeps what is left in order
                assert not stand_in.queued
            stand_in.reset()
            np.testing.assert_array_equal(session.run(made.flat), made.wanted())


@pytest.mark.parametrize(
    "feed, words",
    [
        ({"splits": [500, 10]}, "message of rank 0 is malformed: it has 500 words"),
        ({"splits": [3, 133]}, "message of rank 0 is malformed: it has 3 words"),
        ({"splits": [-85, 221]}, "message of rank 0 is malformed: it has -85 words"),
        ({"splits": [84, 52]}, "message of rank 0 is malformed"),
        ({"rows": [1, 2]}, "the ranks ask for 5 rows of table 1, but 2 row numbers are given"),
    ],
)
@pytest.mark.usefixtures("bound", "stand_in")
def test_what_cannot_be_is_refused(feed: dict[str, Any], words: str):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Gathered(COUNTS)
        session.run(tf.global_variables_initializer())
        given = {made.splits: feed["splits"]} if "splits" in feed else {made.rows[1]: feed["rows"]}
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            session.run(made.flat, given)


@pytest.mark.usefixtures("bound")
def test_gradients_are_those_of_the_same_kernels():
    with tf.Graph().as_default():
        made = Gathered(COUNTS)
        tf.gradients(tf.reduce_sum(made.flat), [table.handle for table in made.tables])
        graph = tf.get_default_graph()
        reduces = [op for op in graph.get_operations() if op.type == "CollectiveReduceRows"]
        assert [op.type for op in reduces] == ["CollectiveReduceRows"]


SPREAD = dict(
    ranks=2,
    section_tables=SECTION_TABLES,
    kinds=[0] * len(DIMS),
    dims=[DIMS[table] for table in SECTION_TABLES],
    pooled=[False] * len(DIMS),
    weighted=[False] * len(DIMS),
    max_norms=[0.0] * len(DIMS),
    shapes=[[ROWS, dim] for dim in DIMS],
)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.usefixtures("bound")
def test_spreading_is_that_of_the_cpu(stand_in: driver.StandIn, delays: bool, scale: float):
    """Also of keys without rows, whose number is after those of the others."""
    rng = np.random.default_rng(4)
    dispatch.bridge().hand_over(gather.SOURCE)
    with tf.Graph().as_default(), tf.Session() as session:
        made = Gathered(COUNTS)
        inverse = [
            tf.constant(rng.integers(0, ROWS + 1, sum(map(len, of_table))), tf.int32)
            for of_table in made.by_table()
        ]
        arguments = [
            [tf.constant(one) for one in made.values],
            inverse,
            [table.handle for table in made.tables],
            made.rows,
            made.message,
            made.splits,
            [tf.constant(made.headers.reshape(-1))],
        ]
        spread = native_library.library().collective_spread_rows
        with tf.get_default_graph()._kernel_label_map({"CollectiveSpreadRows": "emulated"}):
            on_device = spread(*arguments, **SPREAD, scale=scale)
        with tf.get_default_graph()._kernel_label_map({}):
            on_cpu = spread(*arguments, **SPREAD, scale=scale)
        session.run(tf.global_variables_initializer())
        stand_in.reset()
        stand_in.delays = delays
        np.testing.assert_array_equal(*session.run([on_device, on_cpu]))
    assert stand_in.launches == ["spread_rows"] and not stand_in.queued
    assert stand_in.calls.count("copy_to_device") == 1 and "wait_for_event" not in stand_in.calls


@pytest.mark.parametrize("name", ["CollectiveGatherRows", "CollectiveSpreadRows"])
@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
def test_a_gpu_has_the_kernel(name: str):
    found = kernels.get_registered_kernels_for_op(name).kernel
    (one,) = [kernel for kernel in found if kernel.device_type == "GPU"]
    assert sorted(one.host_memory_arg) == ["handles", "headers", "splits"] and not one.label
