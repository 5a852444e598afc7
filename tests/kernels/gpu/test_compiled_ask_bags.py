"""Checks CollectiveAsk of pooled sections on a device, against the operation of the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.exchange import dispatch, embedding_bag
from collective.ops.gpu import compiled_launches, distinct, partition
from tests.gpu_double import driver
from tests.gpu_double.replay import replaying

ORDERED = [
    "distinct_insert",
    "distinct_count",
    "partition_scan",
    "distinct_number",
]
BAGS = [
    "run_starts",
    "order_bags",
    "count_bags",
    "partition_scan",
    "number_bags",
    "place_runs",
    "begin_bags",
    "partition_scan",
    "write_bags",
]
LAUNCHES = [*ORDERED, *BAGS, "write_positions", "list_bags"]


@pytest.fixture(autouse=True)
def handed_over(bound: Any) -> None:
    """Hands the kernels over, as the first lookup does."""
    for source in (
        compiled_launches.ASK,
        compiled_launches.ASK_BAGS,
        distinct.SOURCE,
        partition.SOURCE,
    ):
        dispatch.bridge().hand_over(source)


@dataclasses.dataclass
class Member:
    """Describes a member and, if it is not None, the combiner of its pooled section."""

    section: int
    combiner: int | None = None
    weighted: bool = False


MEMBERS = [
    Member(2, embedding_bag.SUM, True),
    Member(0),
    Member(1, embedding_bag.MEAN),
    Member(4, embedding_bag.SQRTN, True),
    Member(0),
    Member(3, embedding_bag.MEAN, True),
    Member(5, embedding_bag.SQRTN),
]
KINDS, DIMS = (0, 1, 0, 0, 1, 0), (4, 3, 16, 8, 1, 2)


class Asked:
    """Builds the emulated operation, and the CPU's, for such members."""

    def __init__(self, ranks: int, members: list[Member] = MEMBERS, **changed: Any):
        self.members = members
        self.ids, self.samples, self.weights = (
            [tf.placeholder(dtype, [None]) for m in members if wanted(m)]
            for dtype, wanted in (
                (tf.int64, lambda m: True),
                (tf.int64, lambda m: m.combiner is not None),
                (tf.float32, lambda m: m.weighted),
            )
        )
        sections = range(1 + max(m.section for m in members))
        attributes = dict(
            ranks=ranks,
            member_sections=[m.section for m in members],
            combiners=[m.combiner or 0 for m in members],
            kinds=KINDS[: len(sections)],
            dims=DIMS[: len(sections)],
            pooled=[any(m.section == s and m.combiner for m in members) for s in sections],
            weighted=[any(m.section == s and m.weighted for m in members) for s in sections],
        )
        attributes.update(changed)
        build = native_library.library().collective_ask
        inputs = (self.ids, self.samples, self.weights)
        self.cpu = build(*inputs, [], [], C=1, **attributes)
        with tf.get_default_graph()._kernel_label_map({"CollectiveAsk": "emulated"}):
            self.device = build(*inputs, [], [], C=2, **attributes)

    def feeds(
        self, ids: list[np.ndarray], samples: list[np.ndarray], weights: list[np.ndarray]
    ) -> dict[Any, Any]:
        keys = [*self.ids, *self.samples, *self.weights]
        return dict(zip(keys, [*ids, *samples, *weights], strict=True))

    def sample_counts(self, feeds: dict[Any, Any]) -> list[int]:
        samples = iter(feeds[tensor] for tensor in self.samples)
        return [
            0 if m.combiner is None else int(max(next(samples), default=-1)) + 1
            for m in self.members
        ]

    def drawn(self, rng: np.random.Generator, most: int) -> dict[Any, Any]:
        """Draws ids, among them repeated, negative and extreme ones, and of one member none;
        samples of any length, and weights whose sums may be 0.
        """
        ids, samples, weights = [], [], []
        without = rng.integers(len(self.members))
        for number, member in enumerate(self.members):
            size = 0 if number == without else int(rng.integers(most + 1))
            extreme = rng.choice([-(2**63), -1, 0, 2**63 - 1, 2**40], size)
            drawn = rng.integers(0, 1 + most // 2, size)
            ids.append(np.where(rng.random(size) < 0.1, extreme, drawn))
            if member.combiner is not None:
                samples.append(np.sort(rng.integers(0, rng.choice([3, 1 + most // 3]), size)))
            if member.weighted:
                some = rng.choice([-1.0, 0.0, 0.5, 2.0], size)
                weights.append(np.where(rng.random(size) < 0.5, some, rng.standard_normal(size)))
        return self.feeds(ids, samples, weights)


def without_samples(got: Any) -> Any:
    """Returns what the CPU's operation gives, too."""
    return got._replace(counts=got.counts[:1])


def equal(got: Any, wanted: Any) -> None:
    tf.nest.map_structure(np.testing.assert_array_equal, list(got), list(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_asking_is_that_of_the_cpu(ranks: int, delays: bool, stand_in: driver.StandIn):
    """Bit by bit: the message, and which bags there are in which order, with their factors."""
    rng = np.random.default_rng(ranks)
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(ranks)
        for most in (1, 7, 300, 5000):
            feeds = asked.drawn(rng, most)
            stand_in.reset()
            stand_in.delays = delays
            got, wanted = (session.run(one, feeds) for one in (asked.device, asked.cpu))
            equal(without_samples(got), wanted)
            assert got.counts[1].tolist() == asked.sample_counts(feeds)
            assert stand_in.calls.count("copy_to_host") == 1
            assert stand_in.calls.count("wait_for_event") == 1
            assert not stand_in.queued
            if most > 300:
                assert stand_in.launches == LAUNCHES
                assert stand_in.calls.count("copy_to_device") == 2


def test_only_pooled_sections():
    rng = np.random.default_rng(5)
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(3, [Member(0, embedding_bag.MEAN), Member(1, embedding_bag.SUM)])
        for most in (2, 50, 3000):
            feeds = asked.drawn(rng, most)
            got, wanted = (session.run(one, feeds) for one in (asked.device, asked.cpu))
            equal(without_samples(got), wanted)


def test_samples_across_tiles_and_far_apart():
    """One of all ids, one of each id, and ones whose numbers need 64 bits."""
    rng, size = np.random.default_rng(6), 4500
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(3, [Member(0, embedding_bag.SQRTN, True)])
        for samples in (
            np.zeros(size, np.int64),
            np.arange(size),
            np.arange(size) // 2000 * 2**40,
        ):
            feeds = asked.feeds([rng.integers(0, 90, size)], [samples], [rng.standard_normal(size)])
            got, wanted = (session.run(one, feeds) for one in (asked.device, asked.cpu))
            equal(without_samples(got), wanted)


def test_nothing_is_asked(stand_in: driver.StandIn):
    none = np.zeros(0, np.int64)
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(3)
        feeds = {tensor: none for tensor in (*asked.ids, *asked.samples, *asked.weights)}
        got, wanted = (session.run(one, feeds) for one in (asked.device, asked.cpu))
        equal(without_samples(got), wanted)
        assert got.message.tolist() == [0] * 2 * 3 * len(DIMS)
    assert not stand_in.queued


def test_bags_are_what_a_loop_finds():
    """Without the CPU's operation: each bag's keys, and what the rank that asks knows of it."""
    ids, samples = np.array([4, 7, 6, 4, 9, 1, 1]), np.array([0, 0, 0, 2, 2, 2, 5])
    weights = np.array([1, 2, 3, -1, 0.5, 0.5, 4])
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2, [Member(0, embedding_bag.MEAN, True)])
        got = session.run(asked.device, asked.feeds([ids], [samples], [weights]))
    even, odd = got.message[: got.splits[0]], got.message[got.splits[0] :]
    assert even[:5].tolist() == [2, 3, 4, 6, 4] and odd[:6].tolist() == [3, 4, 7, 9, 1, 1]
    assert even[5:6].view(np.int32).tolist() == [2, 1]
    assert odd[6:8].view(np.int32).tolist() == [1, 2, 1, 0]
    assert even[6:].view(np.float32).tolist() == [1, 3, -1, 0]
    assert odd[8:].view(np.float32).tolist() == [2, 0.5, 0.5, 4]
    assert got.counts[0].tolist() == [2, 3] and got.row_splits.tolist() == [8, 12]
    assert got.positions[0].tolist() == [0, 2, 1, 3, 4]
    assert got.bag_samples[0].tolist() == [0, 0, 2, 2, 5]
    np.testing.assert_array_equal(got.bag_scales[0], np.float32([1 / 6, 1 / 6, 0, 0, 1 / 4]))


def test_each_call_of_the_driver_may_fail(stand_in: driver.StandIn):
    """Then the operation fails, and nothing of it is under way after it."""
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2)
        feeds = asked.drawn(np.random.default_rng(0), 50)
        session.run(asked.device, feeds)
        stand_in.reset()
        wanted = session.run(asked.device, feeds)
        names = list(stand_in.calls)
        assert len(names) > len(LAUNCHES) + 4
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


def test_a_step_is_replayed_without_launches(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2)
        feeds = asked.drawn(np.random.default_rng(0), 50)
        wanted = session.run(asked.device, feeds)
        with replaying(lambda: session.run(asked.device, feeds)):
            calls = len(stand_in.calls)
            got = session.run(asked.device, feeds)
            equal([got.splits, *got.counts], [wanted.splits, *wanted.counts])
            assert len(stand_in.calls) == calls


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize(
    "members, wrong, words",
    [
        ([Member(0, 1), Member(1, 1)], {1: [0, 2, 1]}, "samples of member 1 must ascend"),
        ([Member(0), Member(1, 1)], {0: [-1, 0, 1]}, "samples of member 1 must ascend from 0 on"),
        (
            [Member(0, 1), Member(1, 1), Member(2, 1)],
            {1: [1, 0, 0], 2: [1, 0, 0]},
            "samples of member 1 must ascend",
        ),
        (
            [Member(0, 1)],
            {0: [0, 1]},
            r"member 0 has ids of shape \[3\] and samples of shape \[2\]",
        ),
    ],
)
def test_wrong_samples_are_refused(
    members: list[Member],
    wrong: dict[int, list[int]],
    words: str,
    delays: bool,
    stand_in: driver.StandIn,
):
    """Both operations name the same member; nothing is under way after the error."""
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2, members)
        ids = [np.array([1, 2, 3])] * len(members)
        samples = [np.array([0, 0, 1])] * len(asked.samples)
        for place, values in wrong.items():
            samples[place] = np.array(values)
        stand_in.delays = delays
        for one in (asked.device, asked.cpu):
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                session.run(one, asked.feeds(ids, samples, []))
        assert not stand_in.queued


def test_weights_of_another_shape_are_refused():
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2, [Member(0, 1, True)])
        feeds = asked.feeds([np.array([1, 2])], [np.array([0, 0])], [np.array([1.0])])
        words = r"member 0 has ids of shape \[2\] and weights of shape \[1\]"
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            session.run(asked.device, feeds)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"combiners": [0]}, "section 0 is pooled: it serves one member, which has a combiner"),
        ({"combiners": [4]}, "member 0 is of section 0 of 1 with combiner 4"),
        ({"pooled": [False]}, "section 0 is of kind 0 and dimension 4.*only pooled sections have"),
        ({"dims": [2**30]}, "no more than 2147483647 can travel at once"),
        ({"counted": [True]}, "no table counts how often keys are asked for"),
        ({"hosts": 2}, "not by hosts"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], words: str):
    with tf.Graph().as_default(), tf.Session() as session:
        asked = Asked(2, [Member(0, 1, True)], **changed)
        feeds = asked.feeds([np.array([1, 2])], [np.array([0, 1])], [np.array([1.0, 2.0])])
        with pytest.raises(tf.errors.OpError, match=words):
            session.run(asked.device, feeds)
