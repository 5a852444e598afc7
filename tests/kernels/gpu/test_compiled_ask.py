"""Checks CollectiveAsk of sections that aren't pooled on a device, against the operation of the CPU
and the plan of Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective.ops import native_library
from collective.ops.exchange import dispatch
from collective.ops.gpu import compiled_launches, distinct, partition
from collective.ops.gpu.segments import Segments, plan
from tests.gpu_double import driver
from tests.gpu_double.replay import replaying
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

DIMS, KINDS, MEMBERS = (4, 3, 16), (0, 1, 0), (2, 0, 1, 0, 2)
OWN = [3, 1, 4]  # members that the rank that asks pools itself, by sample
LAUNCHES = [
    "fill_samples",
    "distinct_insert",
    "distinct_count",
    "partition_scan",
    "distinct_number",
    "write_request",
    "write_positions",
]


def hand_over() -> None:
    """Hands the kernels over, as the first lookup does."""
    for source in (compiled_launches.ASK, distinct.SOURCE, partition.SOURCE):
        dispatch.bridge().hand_over(source)


@pytest.fixture
def handed_over(bound: Any) -> None:
    hand_over()


class Asked:
    """Builds the emulated operation, and the CPU's, for members of three sections.

    Args:
        own: members with samples.
    """

    def __init__(self, ranks: int, members: Sequence[int] = MEMBERS, own: Sequence[int] = OWN):
        self.ids = [tf.placeholder(tf.int64, [None]) for _ in members]
        self.samples = {m: tf.placeholder(tf.int64, [None]) for m in own}
        self.weights = {m: tf.placeholder(tf.float32, [None]) for m in own[1:]}
        attributes = dict(
            ranks=ranks,
            member_sections=list(members),
            combiners=[0] * len(members),
            kinds=KINDS,
            dims=DIMS,
            pooled=[False] * len(DIMS),
            weighted=[False] * len(DIMS),
        )
        build = native_library.library().collective_ask
        self.cpu = build(self.ids, [], [], [], [], C=1, **attributes)
        with tf.get_default_graph()._kernel_label_map({"CollectiveAsk": "emulated"}):
            self.device = build(
                self.ids,
                [],
                [],
                list(self.samples.values()),
                list(self.weights.values()),
                C=2,
                own=list(own),
                **attributes,
            )

    def feeds(self, ids: Sequence[Any]) -> dict[Any, Any]:
        """Feeds ids, and for the members that are pooled a sample for every two of them; weights of
        some.
        """
        samples = {at: np.arange(len(ids[m])) // 2 for m, at in self.samples.items()}
        weights = {at: np.arange(len(ids[m])) / 4 for m, at in self.weights.items()}
        return {**dict(zip(self.ids, ids)), **samples, **weights}


def ids_of(rng: np.random.Generator, most: int) -> list[np.ndarray]:
    """Draws ids of all members: repeated ones, none, negative and extreme ones."""
    drawn = [rng.integers(0, 1 + most // 2, rng.integers(0, most)) for _ in MEMBERS]
    drawn[rng.integers(len(MEMBERS))] = np.zeros(0, np.int64)
    drawn[1] = rng.choice([-(2**63), -1, 0, 2**63 - 1, 5, 2**40], 20)
    return drawn


def sample_counts(ids: Sequence[np.ndarray], own: Sequence[int] = OWN) -> list[int]:
    return [(len(of) + 1) // 2 if m in own else 0 for m, of in enumerate(ids)]


def without_samples(got: Any) -> Any:
    """Returns what the CPU's operation gives, too."""
    return got._replace(counts=got.counts[:1], uploaded_samples=[], uploaded_weights=[])


def equal(got: Any, wanted: Any) -> None:
    tf.nest.map_structure(np.testing.assert_array_equal, list(got), list(wanted))


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.usefixtures("handed_over")
def test_asking_is_that_of_the_cpu(ranks: int, delays: bool, stand_in: driver.StandIn):
    rng = np.random.default_rng(ranks)
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(ranks)
        for most in (5, 300, 5000):
            ids = ids_of(rng, most)
            feeds = asked.feeds(ids)
            stand_in.reset()
            stand_in.delays = delays
            got, wanted = (session.run(one, feeds) for one in (asked.device, asked.cpu))
            equal(without_samples(got), wanted)
            assert got.counts[1].tolist() == sample_counts(ids)
            equal(got.uploaded_samples, [feeds[at] for at in asked.samples.values()])
            equal(got.uploaded_weights, [feeds[at] for at in asked.weights.values()])
            assert stand_in.launches == LAUNCHES
            assert stand_in.calls.count("copy_to_device") == 1, (
                "ids and all that kernels need, in one piece"
            )
            assert stand_in.calls.count("copy_to_host") == 1, "the counts of rows"
            assert stand_in.calls.count("wait_for_event") == 1
            assert not stand_in.queued


@pytest.mark.usefixtures("handed_over")
def test_nothing_is_asked():
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(3)
        feeds = asked.feeds([np.zeros(0, np.int64)] * len(MEMBERS))
        got, wanted = (session.run(one, feeds) for one in (asked.device, asked.cpu))
        equal(without_samples(got), wanted)
        assert got.message.tolist() == [0] * 2 * 3 * len(DIMS)
        assert got.counts[1].tolist() == [0] * len(MEMBERS)


@pytest.mark.usefixtures("handed_over")
def test_what_no_count_can_say_is_told_apart():
    """A request refuses no samples: who pools them does, once all ranks have passed the gate."""
    lasts = {0: [-1], 1: [5, 2**31 - 2], 2: [2**31 - 1], 3: [2**62], 4: [-(2**63)]}
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2, own=list(lasts))
        feeds = asked.feeds([np.array([7])] * len(MEMBERS))
        feeds |= {asked.samples[m]: samples for m, samples in lasts.items()}
        got = session.run(asked.device.counts[1], feeds)
    assert got.tolist() == [-1, 2**31 - 1, 2**31 - 1, 2**31 - 1, -1]


@pytest.mark.usefixtures("handed_over")
def test_positions_count_the_rows_that_come_back():
    """By keys that are looked up at their place, without the CPU's operation."""
    rng, ranks = np.random.default_rng(9), 3
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(ranks)
        ids = ids_of(rng, 200)
        got = session.run(asked.device, asked.feeds(ids))
    counts = got.counts[0].reshape(ranks, -1)
    words = np.split(got.message, np.cumsum(got.splits)[:-1])
    rows = [
        (s, key)
        for part, of_rank in zip(words, counts)
        for s, keys in enumerate(np.split(part[2 * len(DIMS) :], np.cumsum(of_rank)[:-1]))
        for key in keys
    ]
    assert len(set(rows)) == len(rows) == counts.sum()
    for m, positions in enumerate(got.positions):
        assert [rows[at] for at in positions] == [(MEMBERS[m], key) for key in ids[m]]
    np.testing.assert_array_equal(got.row_splits, counts @ DIMS)


def test_the_plan_is_that_of_python(monkeypatch: pytest.MonkeyPatch, stand_in: driver.StandIn):
    """Word by word."""
    bind(EmulatedBridge(), monkeypatch)
    hand_over()
    rng = np.random.default_rng(1)
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2)
        for most in (1, 3000, 9000):
            ids = ids_of(rng, most)
            stand_in.reset()
            session.run(asked.device.splits, asked.feeds(ids))
            wanted = plan(Segments.of([len(one) for one in ids], MEMBERS), KINDS)
            segments = wanted.segments.reshape(-1)
            words = np.frombuffer(stand_in.uploads[0], np.int64)
            keys = np.concatenate(ids)
            np.testing.assert_array_equal(words[: len(keys)], keys)
            offsets = 4 * sum(len(ids[member]) > 2 for member in OWN)
            words = words[-(len(segments) + (len(DIMS) + 2) // 2 + offsets) :]
            np.testing.assert_array_equal(words[: len(segments)], segments)
            section_tiles = words[len(segments) :].view(np.uint32)[: len(DIMS) + 1]
            np.testing.assert_array_equal(section_tiles, wanted.section_tiles)


@pytest.mark.usefixtures("handed_over")
def test_each_call_of_the_driver_may_fail(stand_in: driver.StandIn):
    """Then the operation fails, and nothing of it is under way after it."""
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2)
        feeds = asked.feeds(ids_of(np.random.default_rng(0), 50))
        session.run(asked.device, feeds)
        stand_in.reset()
        wanted = session.run(asked.device, feeds)
        names = list(stand_in.calls)
        assert len(names) > len(LAUNCHES) + 3
        for number, name in enumerate(names, 1):
            stand_in.reset()
            stand_in.delays, stand_in.fails_at = True, number
            if name == "destroy_event":
                session.run(asked.device, feeds)
                continue
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu"):
                session.run(asked.device, feeds)
            if name != "wait_for_stream":
                assert not stand_in.queued
            stand_in.reset()
            equal(session.run(asked.device, feeds), wanted)


@pytest.mark.usefixtures("handed_over")
def test_a_step_is_replayed_without_launches(stand_in: driver.StandIn):
    """As a measurement of the host's time does: sizes are those of the step before."""
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2)
        feeds = asked.feeds(ids_of(np.random.default_rng(0), 50))
        wanted = session.run(asked.device, feeds)
        with replaying(lambda: session.run(asked.device, feeds)):
            calls = len(stand_in.calls)
            for _ in range(2):
                got = session.run(asked.device, feeds)
                equal([got.splits, *got.counts], [wanted.splits, *wanted.counts])
            assert len(stand_in.calls) == calls
        equal(session.run(asked.device, feeds), wanted)
        assert len(stand_in.calls) > calls


def build(own_samples: Sequence[Any] = (), **changed: Any) -> Any:
    attributes = dict(
        C=2,
        ranks=2,
        member_sections=[0],
        combiners=[0],
        kinds=[0],
        dims=[4],
        pooled=[False],
        weighted=[False],
    )
    with tf.get_default_graph()._kernel_label_map({"CollectiveAsk": "emulated"}):
        return native_library.library().collective_ask(
            [tf.constant([1, 2], tf.int64)],
            [],
            [],
            list(own_samples),
            [],
            **{**attributes, **changed},
        )


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"counted": [True]}, "no table counts how often keys are asked for"),
        ({"hosts": 2}, "not by hosts"),
        ({"C": 0}, "C must be 2"),
        ({"C": 1}, "C must be 2"),
        ({"own": [0]}, "own names 1 members, but there are 0 own_samples"),
        ({"own": [1], "own_samples": [[0, 1]]}, "own names member 1 of 1"),
        ({"own": [0, 0], "own_samples": [[0, 1]] * 2}, "own names member 0 of 1"),
        ({"member_sections": [1]}, "member 0 is of section 1 of 1"),
        ({"kinds": [9]}, "section 0 is of kind 9"),
        ({"dims": [2**30]}, "no more than 2147483647 can travel at once"),
        ({"ranks": 2000}, "there are 2000 ranks, but no more than 1536"),
    ],
)
@pytest.mark.usefixtures("handed_over", "stand_in")
def test_what_cannot_be_is_refused(changed: dict[str, Any], words: str):
    with tf.Graph().as_default(), tf.Session() as session:
        with pytest.raises(tf.errors.OpError, match=words):
            session.run(build(**changed).splits)


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
def test_a_gpu_has_the_kernel():
    found = kernels.get_registered_kernels_for_op("CollectiveAsk").kernel
    (one,) = [kernel for kernel in found if kernel.device_type == "GPU"]
    given = ["ids", "samples", "weights", "own_samples", "own_weights"]
    assert set(one.host_memory_arg) == {*given, "counts", "row_splits", "splits"}
    assert not one.label
