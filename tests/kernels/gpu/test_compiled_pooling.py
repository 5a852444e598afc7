"""Checks the compiled operations that pool rows by kernels, and make the gradients of that: see
`test_compiled_operations.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective.ops import native_library
from collective.ops.exchange import embedding_bag
from collective.ops.exchange.embedding_bag import MEAN, ROWS, SQRTN, SUM, BagMember
from collective.ops.gpu import occurrences, pool, segments, sums
from collective.ops.gpu.reference import pool as reference
from tests.gpu_double import driver
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

COUNTS = np.array([[5, 2, 7], [0, 4, 6]])  # of rows, by rank and section
DIMS = (4, 3, 16)
MEMBERS = [
    BagMember(0, 4, SUM),
    BagMember(0, 4, ROWS),
    BagMember(1, 3, MEAN, True),
    BagMember(2, 16, SQRTN, True, 2.5),
    BagMember(2, 16, ROWS, False, 3.0),
    BagMember(1, 3, SQRTN),
    BagMember(2, 16, MEAN),
]
PLAIN = [BagMember(0, 4, SUM), BagMember(0, 4, MEAN)]
ONE_RUN = np.array([[9], [4]])


class Pooled:
    """Builds a pool of rows that came back, and what NumPy makes of the same in float64.

    Args:
        members: the lookups.
        counts: [N, S] rows.
        ids: of each member.
    """

    def __init__(
        self,
        members: Sequence[BagMember] = MEMBERS,
        counts: np.ndarray = COUNTS,
        ids: int = 30,
        seed: int = 0,
    ):
        self.members, self.counts = members, counts
        rng, (ranks, sections) = np.random.default_rng(seed), counts.shape
        self.matrices = [
            rng.standard_normal((counts[:, s].sum(), DIMS[s])).astype(np.float32)
            for s in range(sections)
        ]
        parts, numbers, first = [], [[] for _ in range(sections)], 0
        ends = np.cumsum(counts, 0)
        for r in range(ranks):
            for s in range(sections):
                parts.append(self.matrices[s][ends[r, s] - counts[r, s] : ends[r, s]].reshape(-1))
                numbers[s] += range(first, first + counts[r, s])
                first += counts[r, s]
        self.numbers = [np.array(of_section, np.int64) for of_section in numbers]
        self.flat = np.concatenate(parts)
        self.local = [rng.integers(0, len(self.matrices[m.section]), ids) for m in members]
        self.samples = [np.sort(rng.integers(0, ids // 2 + 1, ids)) for _ in members]
        self.samples[0] = np.sort(np.where(self.samples[0] < 4, 5, self.samples[0]))  # a gap
        self.weights = [rng.uniform(-0.5, 2, ids).astype(np.float32) for _ in members]
        for weights, samples in zip(self.weights, self.samples):
            weights[samples == samples[-1]] = 0
        self.gradients = [
            rng.standard_normal((self.rows_of(m), member.dim)).astype(np.float32)
            for m, member in enumerate(members)
        ]
        self.rows = tf.placeholder_with_default(self.flat, [len(self.flat)])
        self.positions = [
            tf.placeholder_with_default(
                self.numbers[member.section][local].astype(np.int32), [None]
            )
            for member, local in zip(members, self.local)
        ]
        self.given_samples = [
            tf.placeholder_with_default(samples, [None])
            for member, samples in zip(members, self.samples)
            if member.combiner != ROWS
        ]
        self.given_weights = [
            tf.placeholder_with_default(weights, [None])
            for member, weights in zip(members, self.weights)
            if member.weighted
        ]
        self.given_counts = tf.placeholder_with_default(
            counts.astype(np.int32).reshape(-1), [counts.size]
        )
        self.given_sizes = tf.placeholder_with_default(
            np.array(
                [
                    0 if member.combiner == ROWS else self.rows_of(m)
                    for m, member in enumerate(members)
                ],
                np.int32,
            ),
            [None],
        )

    def rows_of(self, m: int) -> int:
        if len(self.local[m]) == 0 or self.members[m].combiner == ROWS:
            return len(self.local[m])
        return int(self.samples[m][-1]) + 1

    def pooled(self) -> list[tf.Tensor]:
        return embedding_bag.pool(
            self.rows,
            self.positions,
            self.given_samples,
            self.given_weights,
            self.members,
            [self.given_counts, self.given_sizes],
        )

    def differentiated(self, wanted: Sequence[int]) -> list[tf.Tensor]:
        """Returns the gradients of the rows and of weights."""
        made = self.pooled()
        loss = tf.add_n([tf.reduce_sum(made[m] * self.gradients[m]) for m in wanted])
        return list(tf.gradients(loss, [self.rows, *self.given_weights]))

    def on_cpu(self) -> list[tf.Tensor]:
        """Pools by the CPU's operation, for which positions are elements."""
        sections = np.tile(np.arange(len(self.matrices)), len(self.counts))
        dims = np.repeat(np.array(DIMS)[sections], self.counts.reshape(-1))
        elements = np.cumsum(dims) - dims
        return list(
            native_library.library().collective_pool(
                self.rows,
                [
                    tf.constant(elements[self.numbers[member.section][local]], tf.int32)
                    for member, local in zip(self.members, self.local)
                ],
                self.given_samples,
                self.given_weights,
                *([] for _ in ("counts", "early", "handles", "ids")),
                **embedding_bag.lookup_attributes(self.members),
            )
        )

    def lookups(self) -> list[pool.Lookup]:
        return [
            pool.Lookup(
                self.rows_of(m),
                member.dim,
                max(member.combiner, SUM),
                member.weighted,
                member.max_norm,
                member.section,
            )
            for m, member in enumerate(self.members)
        ]

    def ids(self, positions: Sequence[np.ndarray]) -> pool.Ids:
        offsets, before = [np.zeros(0, np.int64)], 0
        for m, member in enumerate(self.members):
            size = len(self.local[m])
            samples = np.arange(size) if member.combiner == ROWS else self.samples[m]
            offsets.append(before + np.searchsorted(samples, np.arange(self.rows_of(m))))
            before += size
        return pool.Ids(
            np.concatenate(positions),
            np.concatenate([*offsets, [before]]).astype(np.int32),
            np.concatenate(self.weights),
        )

    def wanted(self) -> list[np.ndarray]:
        return reference.pool(self.lookups(), self.matrices, self.ids(self.local))

    def wanted_gradients(self, members: Sequence[int]) -> list[np.ndarray]:
        """Computes the gradients of rows and of weights."""
        ids, lookups = self.ids(self.local), self.lookups()
        gradients = [g if m in members else 0 * g for m, g in enumerate(self.gradients)]
        made = reference.pool_terms(lookups, self.matrices, ids, gradients, of_weights=True)
        of_matrices = [np.zeros(matrix.shape) for matrix in self.matrices]
        first, firsts = 0, np.cumsum([0, *(lookup.samples for lookup in lookups)])
        of_weights = []
        for m, (member, local) in enumerate(zip(self.members, self.local)):
            part = slice(first, first := first + len(local))
            samples = made.terms[part, 0].astype(np.int64) - firsts[m]
            factors = made.terms[part, 1].copy().view(np.float32).astype(np.float64)
            of_rows = factors[:, None] * gradients[m][samples]
            if made.along is not None:
                own = self.matrices[member.section][local]
                of_rows = of_rows + made.along[part, None] * own
            np.add.at(of_matrices[member.section], local, of_rows)
            if member.weighted:
                of_weights.append(made.weights[part])
        ordered = np.empty(int(self.counts.sum()), object)
        for numbers, matrix in zip(self.numbers, of_matrices):
            for number, row in zip(numbers, matrix):
                ordered[number] = row
        return [np.concatenate(list(ordered)), *of_weights]


def close(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    assert len(got) == len(wanted)
    for number, (one, other) in enumerate(zip(got, wanted)):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5, err_msg=str(number))


# ---- forward


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.usefixtures("bound")
def test_rows_are_pooled(stand_in: driver.StandIn, delays: bool):
    """As NumPy and the CPU's operation do, also where nothing is done before somebody waits."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled()
        pooled, on_cpu = made.pooled(), made.on_cpu()
        assert pooled[0].op.type == "CollectivePool"
        stand_in.delays = delays
        got = session.run(pooled)
        close(got, made.wanted())
        close(got, session.run(on_cpu))
    assert stand_in.launches == ["sample_offsets", "pool_products", "pool_rows"]
    assert not stand_in.queued
    assert stand_in.calls.count("copy_to_device") == 1
    assert "wait_for_event" not in stand_in.calls and "copy_to_host" not in stand_in.calls


@pytest.mark.usefixtures("bound")
def test_plain_rows_have_a_kernel_of_their_own(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled(PLAIN, ONE_RUN)
        close(session.run(made.pooled()), made.wanted())
    assert stand_in.launches[-1] == "pool_rows_plain"


@pytest.mark.usefixtures("bound")
def test_members_without_samples_have_a_row_for_each_id(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled([BagMember(1, 3), BagMember(0, 4), BagMember(2, 16)])
        close(session.run(made.pooled()), made.wanted())
    assert stand_in.launches == ["sample_offsets", "pool_rows"]


@pytest.mark.usefixtures("bound")
def test_no_ids_and_no_rows(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled(ids=4)
        none = {one: np.zeros(0, np.int64) for one in [*made.positions, *made.given_samples]}
        none |= {one: np.zeros(0, np.float32) for one in made.given_weights}
        none[made.given_sizes] = np.zeros(len(MEMBERS), np.int32)
        got = session.run(made.pooled(), none)
        assert [one.shape for one in got] == [(0, member.dim) for member in MEMBERS]
        assert stand_in.launches == []


@pytest.mark.usefixtures("bound")
def test_positions_that_are_of_no_row_are_zeros():
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled([BagMember(0, 4, SUM)], ONE_RUN, ids=4)
        rows, out_of = made.numbers[0], {made.positions[0]: [-1, 3, 13, 2**31 - 1]}
        samples = {made.given_samples[0]: [0, 1, 2, 3], made.given_sizes: [4]}
        (got,) = session.run(made.pooled(), {**out_of, **samples})
        wanted = np.zeros((4, 4))
        wanted[1] = made.matrices[0][rows == 3]
        np.testing.assert_array_equal(got, wanted)


def _without(words: np.ndarray, columns: Sequence[int]) -> np.ndarray:
    return np.delete(words, columns, 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_that_of_python(
    monkeypatch: pytest.MonkeyPatch, stand_in: driver.StandIn, seed: int
):
    """Word by word, except for the addresses: of the forward and of the backward computation."""
    bind(EmulatedBridge(), monkeypatch)
    rng = np.random.default_rng(seed)
    members = [
        BagMember(
            section,
            DIMS[section],
            int(combiner := rng.integers(0, 4)),
            bool(combiner and rng.integers(0, 2)),
            float(rng.integers(0, 2) * 1.5),
        )
        for section in (0, 1, 2, 0, 1)
    ]
    members.append(BagMember(2, 16, SUM, max_norm=1.0))
    counts = rng.integers(0, 3, (4, 3)) * rng.integers(1, 20, (4, 3)) + (np.arange(4) == 2)[:, None]
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled(members, counts, ids=int(rng.integers(40, 200)), seed=seed)
        session.run(made.pooled())
        (forward,) = stand_in.uploads
        stand_in.reset()
        session.run(made.differentiated(range(6)))
        backward = stand_in.uploads[-1]
    lookups, nowhere = made.lookups(), np.zeros(6, np.int64)
    dims = np.array(DIMS * 4)
    starts = np.cumsum(counts.reshape(-1) * dims) - counts.reshape(-1) * dims
    runs = sums.Rows(4 * starts, counts.reshape(-1), dims).words()
    by_lookup = np.tile([0, len(runs)], (6, 1))
    samples = np.array([lookup.samples for lookup in lookups])
    tiles = -(-samples // segments.THREADS)
    batches = np.stack(
        [
            np.cumsum(tiles) - tiles,
            np.cumsum(samples) - samples,
            np.cumsum(samples),
            np.arange(6) * len(made.local[0]),
            np.full(6, len(made.local[0])),
        ],
        1,
    )

    def lookup_words(each: int | None, lanes: int | None = None) -> np.ndarray:
        words, _ = pool._words(lookups, by_lookup, nowhere, (0, 0), each, lanes)
        return _without(words, [5, 11, 12])

    class Reader:
        """Takes parts of what was uploaded."""

        def __init__(self, uploaded: bytes):
            self.words, self.at = np.frombuffer(uploaded, np.int64), 0

        def take(self, rows: int, columns: int) -> np.ndarray:
            begin, self.at = self.at, self.at + rows * columns
            return self.words[begin : self.at].reshape(rows, columns)

    reader = Reader(forward)
    np.testing.assert_array_equal(reader.take(6, 6)[:, :5], batches)
    fewer = 6 * len(made.local[0]) <= samples.sum()
    for each in (None if fewer else 4, 1):
        np.testing.assert_array_equal(_without(reader.take(6, 14), [5, 11, 12]), lookup_words(each))
    got = reader.take(len(runs), 3)
    np.testing.assert_array_equal(got - [0, 0, got[0, 2] - runs[0, 2]], runs)
    assert reader.at == len(reader.words)

    reader = Reader(backward)
    np.testing.assert_array_equal(reader.take(6, 6)[:, :5], batches)
    for lanes in (1, None):
        got = _without(reader.take(6, 14), [5, 11, 12])
        wanted = lookup_words(1, lanes)
        by = [5, 6] if lanes == 1 else []  # terms need no runs
        np.testing.assert_array_equal(_without(got, by), _without(wanted, by))
    got = reader.take(len(runs), 3)
    np.testing.assert_array_equal(got - [0, 0, got[0, 2] - runs[0, 2]], runs)
    gradients = reader.take(6, 3)
    np.testing.assert_array_equal(gradients[:, 0], np.cumsum(samples) - samples)
    np.testing.assert_array_equal(gradients[:, 1], samples)
    ids, rows = 6 * len(made.local[0]), int(counts.sum())
    tiles = -(-ids // occurrences.SORT_TILE)
    np.testing.assert_array_equal(reader.take(1, 1).view(np.uint32)[0], [0, tiles])
    assert reader.take(1, 1)[0, 0] == 0
    np.testing.assert_array_equal(reader.take(6, 3), gradients)
    partial = reader.take(1, 3)[0]
    assert partial[1] == occurrences.most_pieces(ids) and rows > 0
    by_run = segments.Segments.of(counts.reshape(-1), list(range(12)))
    targets, _ = sums.target_words(by_run, dims, np.zeros((12, 4), np.int64), counts.reshape(-1), 4)
    # Rows of a section are sums of the gradients of its members, a run each.
    of_section = [[m for m, member in enumerate(members) if member.section == s] for s in range(3)]
    for words, section in zip(targets, np.tile(range(3), 4)[counts.reshape(-1) > 0]):
        first, last = of_section[section][0], of_section[section][-1]
        words[-2:] = first, last - first + 1
    addresses = [5, 7]
    got = reader.take(len(targets), 13)
    np.testing.assert_array_equal(_without(got, addresses), _without(targets, addresses))
    assert reader.at == len(reader.words)


# ---- backward


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.usefixtures("bound")
def test_gradients_are_those_of_numpy(stand_in: driver.StandIn, delays: bool):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled()
        gradients = made.differentiated(range(len(MEMBERS)))
        assert gradients[0].op.type == "CollectivePoolGradient"
        stand_in.delays = delays
        close(session.run(gradients), made.wanted_gradients(range(len(MEMBERS))))
    of_gradient = stand_in.launches[stand_in.launches.index("pool_terms") - 3 :]
    assert of_gradient[:5] == [
        "sample_offsets",
        "pool_products",
        "pool_products",
        "pool_terms",
        "pool_weights",
    ]
    assert of_gradient[5:] == [
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


@pytest.mark.usefixtures("bound")
def test_gradients_of_some_members_only(stand_in: driver.StandIn):
    """The weights of another member have zeros."""
    with tf.Graph().as_default(), tf.Session() as session:
        made, stand_in.delays = Pooled(), True
        close(session.run(made.differentiated([0, 2])), made.wanted_gradients([0, 2]))


@pytest.mark.usefixtures("bound")
def test_a_row_that_occurs_often():
    """Its sum is made in pieces."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled(PLAIN, np.array([[2]]), ids=1500)
        gradients = session.run(made.differentiated([0, 1]))
        np.testing.assert_allclose(gradients[0], made.wanted_gradients([0, 1])[0], 1e-3, 1e-3)


@pytest.mark.usefixtures("bound")
def test_a_second_derivative(stand_in: driver.StandIn):
    """Of what is linear in the rows: that of the gradient is a pool of what it is multiplied by."""
    members = [member for member in MEMBERS if not member.weighted and not member.max_norm]
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled(members)
        factors = tf.constant(np.random.default_rng(3).standard_normal(len(made.flat)), tf.float32)
        pooled = made.pooled()
        weights = [tf.constant(gradient) for gradient in made.gradients]
        loss = tf.add_n([tf.reduce_sum(one * by) for one, by in zip(pooled, weights)])
        (first,) = tf.gradients(loss, [made.rows])
        second = tf.gradients(tf.reduce_sum(first * factors), weights)
        close(session.run(second), session.run(pooled, {made.rows: session.run(factors)}))


# ---- what fails


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("bound", ["double"], indirect=True)
def test_each_call_of_the_driver_may_fail(bound: Any, stand_in: driver.StandIn, backward: bool):
    """Then the operation fails, nothing of it is under way after it, and the next one works."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled()
        run, wanted = made.pooled(), made.wanted()
        given = {made.rows: made.flat}
        if backward:
            # without the forward computation
            run = list(
                embedding_bag.operations().collective_pool_gradient(
                    made.rows,
                    made.positions,
                    made.given_samples,
                    made.given_weights,
                    [tf.constant(gradient) for gradient in made.gradients[:-3]],
                    [made.given_counts, made.given_sizes],
                    members=list(range(len(MEMBERS) - 3)),
                    **embedding_bag.lookup_attributes(MEMBERS),
                )
            )
            run, wanted = [run[0], *run[1]], made.wanted_gradients(range(len(MEMBERS) - 3))
        session.run(run, given)
        stand_in.reset()
        session.run(run, given)
        names = list(stand_in.calls)
        assert len(names) > 4
        for number, name in enumerate(names, 1):
            stand_in.reset()
            stand_in.delays, stand_in.fails_at = True, number
            if name == "destroy_event":
                session.run(run, given)
                continue
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu"):
                session.run(run, given)
            if name != "wait_for_stream":  # on a GPU, the stream itself keeps what is left in order
                assert not stand_in.queued
        stand_in.reset()
        close(session.run(run, given), wanted)


@pytest.mark.parametrize(
    "feed, words",
    [
        ({"counts": [5, 2, 7, 0, 4, 7]}, "184 elements of rows|elements of rows, but by"),
        ({"counts": [5, 2, 7, 0, 4, -6]}, "counts must not be negative: one is -6"),
        ({"counts": [5, 2, 7, 0]}, "counts must be of 3 sections for each rank"),
        ({"sizes": [-1, *[9] * 6]}, "samples of member 0 must ascend from 0 on: the last one is"),
        ({"sizes": [2**29, *[9] * 6]}, "member 0 has 536870912 samples or more: so many rows of 4"),
        ({"sizes": [0, *[9] * 6]}, "member 0 has 30 ids and 0 samples, by the counts"),
        ({"sizes": [9] * 6}, r"samples of 7 members, but these counts are of shape \[6\]"),
        ({"sample": np.zeros(3)}, r"member 0 has positions of shape \[30\] and samples of .*\[3\]"),
        ({"weight": np.ones(3)}, r"member 2 has positions of shape \[30\] and weights of .*\[3\]"),
    ],
)
@pytest.mark.usefixtures("bound", "stand_in")
def test_what_cannot_be_is_refused(feed: dict[str, Any], words: str):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled()
        made.given_counts = tf.placeholder_with_default(
            made.counts.astype(np.int32).reshape(-1), [None]
        )
        places = {
            "counts": made.given_counts,
            "sample": made.given_samples[0],
            "weight": made.given_weights[0],
            "sizes": made.given_sizes,
        }
        ((name, value),) = feed.items()
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            session.run(made.pooled(), {places[name]: value})


@pytest.mark.usefixtures("bound", "stand_in")
def test_gradients_of_another_shape_are_refused():
    with tf.Graph().as_default(), tf.Session() as session:
        made = Pooled([BagMember(0, 4, SUM), BagMember(0, 4)], ONE_RUN)
        gradients = [tf.placeholder(tf.float32, [None, None]) for _ in range(2)]
        (flat,) = tf.gradients(made.pooled(), [made.rows], grad_ys=gradients)
        sizes = [made.rows_of(0), made.rows_of(1)]
        for wrong, words in (([0, 4], "member 0 with 30 ids"), ([sizes[0], 3], "member 0 with")):
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                session.run(flat, {gradients[0]: np.ones(wrong), gradients[1]: np.ones([30, 4])})
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"must be of shape \[30,4\]"):
            session.run(
                flat, {gradients[0]: np.ones([sizes[0], 4]), gradients[1]: np.ones([29, 4])}
            )


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
@pytest.mark.parametrize("name", ["CollectivePool", "CollectivePoolGradient"])
def test_a_gpu_has_the_kernel(name: str):
    found = kernels.get_registered_kernels_for_op(name).kernel
    (one,) = [kernel for kernel in found if kernel.device_type == "GPU"]
    tables = ["handles"] * (name == "CollectivePool")
    assert list(one.host_memory_arg) == ["counts", *tables] and not one.label
