"""Checks the compiled operations that read requests on a device, against those of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective.ops import native_library
from collective.ops.exchange import dispatch
from collective.ops.gpu import partition
from collective.ops.gpu.segments import Segments
from tests.gpu_double import driver
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

DIMS, KINDS = (4, 3, 16), (0, 1, 0)
TABLES, POOLED, WEIGHTED = (2, 0, 1, 0), (False, True, False, True), (False, True, False, False)
SECTIONS = range(len(TABLES))


def message_of(rng: np.random.Generator, keys: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Makes a message of [N, S] keys, which asks as few bags of pooled sections as it can; a rank
    with -1 keys has no words.
    """
    words, splits = [], []
    for of_rank in keys:
        if of_rank[0] < 0:
            splits.append(0)
            continue
        bags = [int(n > 0) if POOLED[s] else n for s, n in enumerate(of_rank)]
        parts = [np.stack([bags, of_rank], 1).reshape(-1)]
        for s, n in enumerate(of_rank):
            parts.append(rng.integers(0, 1000, n))
            if POOLED[s]:
                parts.append(np.full((bags[s] + 1) // 2, n))
            if WEIGHTED[s]:
                parts.append(rng.integers(0, 2**62, (n + 1) // 2))
        words.append(np.concatenate(parts))
        splits.append(len(words[-1]))
    return np.concatenate(words).astype(np.int64), splits


class Heard:
    """Builds the emulated operation, and the CPU's, for messages of N ranks."""

    def __init__(self, ranks: int):
        self.message, self.splits = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int32)
        attributes = dict(
            T=len(DIMS),
            H=1,
            ranks=ranks,
            section_tables=TABLES,
            kinds=KINDS,
            dims=[DIMS[t] for t in TABLES],
            pooled=POOLED,
            weighted=WEIGHTED,
        )
        self.cpu = native_library.library().collective_hear(self.message, self.splits, **attributes)
        with tf.get_default_graph()._kernel_label_map({"CollectiveHear": "emulated"}):
            self.device = native_library.library().collective_hear(
                self.message, self.splits, **attributes
            )

    def feeds(self, message: Any, splits: Any) -> dict[Any, Any]:
        return {self.message: message, self.splits: splits}


@pytest.fixture
def handed_over(bound: None) -> None:
    """Hands the kernels over, as the first lookup does."""
    dispatch.bridge().hand_over(partition.SOURCE)


def equal(got: Any, wanted: Any) -> None:
    tf.nest.map_structure(np.testing.assert_array_equal, list(got), list(wanted))


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.usefixtures("handed_over")
def test_hearing_is_that_of_the_cpu(ranks: int, delays: bool, stand_in: driver.StandIn):
    rng = np.random.default_rng(ranks)
    with tf.Graph().as_default(), tf.Session() as session:
        heard = Heard(ranks)
        for trial in range(6):
            keys = rng.integers(0, 3, (ranks, len(TABLES))) * rng.integers(1, 3000)
            if ranks > 1 and trial % 2:
                keys[rng.integers(ranks)] = -1
            feeds = heard.feeds(*message_of(rng, keys))
            stand_in.reset()
            stand_in.delays = delays
            got, wanted = (session.run(one, feeds) for one in (heard.device, heard.cpu))
            equal(got, wanted)
            equal([got.headers[0].reshape(-1, 2)[:, 1]], [np.maximum(keys, 0).reshape(-1)])
            assert stand_in.launches == ["local_rows"] * bool(keys.max() > 0)
            assert stand_in.calls.count("copy_to_device") == len(stand_in.launches)
            assert stand_in.calls.count("wait_for_event") == 1, "for the headers"
            assert not stand_in.queued


def test_the_plan_of_hearing_is_that_of_python(
    monkeypatch: pytest.MonkeyPatch, stand_in: driver.StandIn
):
    """Word by word, except for the addresses."""
    bridge, rng = EmulatedBridge(), np.random.default_rng(3)
    bind(bridge, monkeypatch)
    bridge.hand_over(partition.SOURCE)
    with tf.Graph().as_default(), tf.Session() as session:
        heard = Heard(3)
        for _ in range(3):
            keys = rng.integers(0, 3, (3, len(TABLES))) * rng.integers(1, 5000)
            stand_in.reset()
            session.run(heard.device.row_splits, heard.feeds(*message_of(rng, keys)))
            wanted, _ = partition.keys_words(Segments.of(keys.reshape(-1), TABLES * 3), KINDS, 0, 0)
            got = np.frombuffer(stand_in.uploads[0], np.int64).reshape(-1, 5)
            np.testing.assert_array_equal(np.delete(got, [1, 2], 1), np.delete(wanted, [1, 2], 1))


@pytest.mark.usefixtures("handed_over")
def test_each_call_of_the_driver_may_fail(stand_in: driver.StandIn):
    """Then the operation fails, and nothing of it is under way after it."""
    with tf.Graph().as_default(), tf.Session() as session:
        heard = Heard(2)
        feeds = heard.feeds(*message_of(np.random.default_rng(0), np.full((2, len(TABLES)), 5)))
        session.run(heard.device, feeds)
        stand_in.reset()
        wanted = session.run(heard.device, feeds)
        names = list(stand_in.calls)
        assert names[:2] == ["copy_to_host"] * 2
        for number, name in enumerate(names, 1):
            stand_in.reset()
            stand_in.delays, stand_in.fails_at = True, number
            if name == "destroy_event":
                session.run(heard.device, feeds)
                continue
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu"):
                session.run(heard.device, feeds)
            if name != "wait_for_stream":
                assert not stand_in.queued
            stand_in.reset()
            equal(session.run(heard.device, feeds), wanted)


@pytest.mark.usefixtures("handed_over", "stand_in")
@pytest.mark.parametrize(
    "message, splits, words",
    [
        ([0] * 8, [8, 0, 0], "one for each of 2 ranks"),
        ([0] * 16, [9, 7], "malformed"),
        ([0] * 16, [-8, 24], "rank 0 is malformed: it has -8 words"),
        ([0] * 7, [7, 0], "rank 0 is malformed: it has 7 words"),
        ([-1, -1, *[0] * 14], [8, 8], "section 0 has -1 bags of -1 keys"),
        ([1, 2, *[0] * 6, 5, 6, *[0] * 8], [10, 8], "section 0 has 1 bags of 2 keys"),
        ([2**40, 2**40, *[0] * 14], [8, 8], "section 0 has 1099511627776 bags"),
    ],
)
def test_malformed_messages(message: Any, splits: Any, words: str):
    with tf.Graph().as_default(), tf.Session() as session:
        heard = Heard(2)
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            session.run(heard.device, heard.feeds(message, splits))


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
def test_a_gpu_has_the_kernels():
    found = kernels.get_registered_kernels_for_op("CollectiveHear").kernel
    (one,) = [kernel for kernel in found if kernel.device_type == "GPU"]
    assert sorted(one.host_memory_arg) == ["headers", "row_splits", "splits"] and not one.label
