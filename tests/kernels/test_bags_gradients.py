"""Gradients of the compiled operations where they are special: of gradients, of weights, of what is
absent, of large sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from bag_exchange import Lookup, Simulation, Table, dense, given, started, variable, whole

from collective.ops.exchange import embedding_bag, shard_gradients
from collective.ops.exchange.embedding_bag_gradients import PooledMembers
from collective.ops.graph import graph_state


@pytest.fixture(autouse=True)
def graph() -> Any:
    with tf.Graph().as_default() as made:
        yield made


def lookups_of(
    rng: np.random.Generator, ranks: int, by_owner: bool = True, weighted: bool = True
) -> list[Lookup]:
    def ids(most: int) -> list[np.ndarray]:
        return [rng.integers(0, most, 12) for _ in range(ranks)]

    samples = [np.sort(rng.integers(0, 6, 12)) for _ in range(ranks)]
    weights = [rng.uniform(0.5, 2, 12) for _ in range(ranks)]
    return [
        Lookup(0, ids(9)),
        Lookup(0, ids(9), "mean", samples),
        Lookup(1, ids(7), "sum", samples, weights if weighted else None),
        Lookup(1, ids(7), "sqrtn", samples, weights if weighted else None, by_owner=by_owner),
        Lookup(0, ids(9), "mean", samples, by_owner=by_owner),
    ]


def two_tables(rng: np.random.Generator) -> list[Table]:
    return [Table(rng.normal(size=[9, 3])), Table(rng.normal(size=[7, 20]))]


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_of_gradients(ranks: int, computing: str):
    """A penalty on the gradient of a table, which is what it is of whole tables."""
    rng = np.random.default_rng(ranks)
    built = Simulation(two_tables(rng), lookups_of(rng, ranks), ranks, twice=True)

    def loss(outputs: Any) -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(tf.sin(o)) for each in outputs for o in each])

    handles = [shard.handle for shards in built.shards for shard in shards]
    weights = [each[2] for each in built.weights]
    with embedding_bag.scaled(0.25):
        first = tf.gradients(loss(built.outputs), handles)
        second = tf.gradients(
            tf.add_n([tf.reduce_sum(tf.square(g.values)) for g in first]), [*handles, *weights]
        )
    plain_first = tf.gradients(loss(built.plain), built.tables)
    # Of distinct rows: plain TensorFlow's slices name a row each time that it was looked up.
    summed = [
        tf.math.unsorted_segment_sum(g.values, g.indices, t.shape[0])
        for g, t in zip(plain_first, built.tables)
    ]
    plain_second = tf.gradients(
        tf.add_n([tf.reduce_sum(tf.square(0.25 * s)) for s in summed]),
        [*built.tables, *[each[2] for each in built.plain_weights]],
    )
    with started() as session:
        got, want = session.run([second, plain_second])
    for t, table in enumerate(built.tables):
        # The gradient of a gradient is itself one, and scaled once more.
        np.testing.assert_allclose(
            whole(built, t, got[t * ranks : (t + 1) * ranks]),
            0.25 * dense(want[t], table.shape),
            rtol=1e-4,
            atol=1e-5,
        )
    for one, other in zip(got[len(handles) :], want[2:]):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_there_is_no_third_derivative():
    rng = np.random.default_rng(5)
    built = Simulation(two_tables(rng), lookups_of(rng, 2, weighted=False), 2, twice=True)
    handles = [shard.handle for shards in built.shards for shard in shards]
    total = tf.add_n([tf.reduce_sum(tf.exp(o)) for each in built.outputs for o in each])
    for _ in range(2):
        total = tf.add_n([tf.reduce_sum(tf.square(g.values)) for g in tf.gradients(total, handles)])
    with pytest.raises(NotImplementedError, match="third derivative"):
        tf.gradients(total, handles)


def test_what_has_no_second_derivative():
    rng = np.random.default_rng(1)
    rows, weights = given(rng.normal(size=6), np.float32), given([1, 2], np.float32)
    positions, samples = given([0, 3], np.int32), given([0, 0])
    pooled = embedding_bag.pool(
        rows,
        [positions],
        [samples],
        [],
        [embedding_bag.BagMember(0, 3, embedding_bag.SUM, max_norm=1.0)],
    )
    first = tf.gradients(tf.sin(pooled), rows)
    with pytest.raises(NotImplementedError, match="max_norm"):
        tf.gradients(first, rows)
    pooled = embedding_bag.pool(
        rows,
        [positions],
        [samples],
        [weights],
        [embedding_bag.BagMember(0, 3, embedding_bag.SUM, True)],
    )
    first = tf.gradients(tf.sin(pooled), weights)
    with pytest.raises(NotImplementedError, match="weights"):
        tf.gradients(first, rows)
    lookup = Lookup(0, [np.array([1, 2])], "sum", [np.array([0, 1])], max_norm=1.0, by_owner=True)
    built = Simulation([Table(np.ones([3, 2]))], [lookup], 1)
    first = tf.gradients(tf.sin(built.outputs[0][0]), built.shards[0][0].handle)[0]
    with pytest.raises(NotImplementedError, match="max_norm"):
        tf.gradients(first.values, built.shards[0][0].handle)


@pytest.mark.parametrize(
    "combiner, code",
    [("sum", embedding_bag.SUM), ("mean", embedding_bag.MEAN), ("sqrtn", embedding_bag.SQRTN)],
)
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_gradients_of_weights_by_differences(combiner: str, code: int, max_norm: float):
    """In float64, also of weights that are negative or 0; where a sample's sum of weights is 0,
    they are 0.
    """
    rng = np.random.default_rng(4)
    rows, factors = rng.normal(size=[5, 3]), rng.normal(size=[3, 3])
    numbers, samples = np.array([0, 1, 2, 1, 1, 4, 0]), np.array([0, 0, 0, 1, 1, 2, 2])
    given_weights = np.array(
        [1.0, -0.5, 0.0, 1.0, -1.0, -2.0, 0.25]
        if code == embedding_bag.MEAN
        else [1.0, -0.5, 0.0, 0.0, 0.0, -2.0, 0.25]
    )
    zero = samples == 1  # their sum, of squares for sqrtn

    def pooled(weights: np.ndarray) -> float:
        norms = np.sqrt((rows**2).sum(1, keepdims=True))
        clipped = rows * max_norm / np.maximum(norms, max_norm) if max_norm else rows
        total = 0.0
        for sample in range(3):
            mine = samples == sample
            w = weights[mine]
            divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w * w).sum())}[combiner]
            if divisor != 0:
                total += (
                    (w[:, None] * clipped[numbers[mine]]).sum(0) / divisor * factors[sample]
                ).sum()
        return total

    flat, weights = given(rows.ravel(), np.float32), given(given_weights, np.float32)
    out = embedding_bag.pool(
        flat,
        [given(3 * numbers, np.int32)],
        [given(samples)],
        [weights],
        [embedding_bag.BagMember(0, 3, code, True, max_norm)],
    )[0]
    gradient = tf.gradients(tf.reduce_sum(out * tf.constant(factors, tf.float32)), weights)[0]
    with tf.Session() as session:
        value, got = session.run([tf.reduce_sum(out * tf.constant(factors, tf.float32)), gradient])
    np.testing.assert_allclose(value, pooled(given_weights), rtol=1e-5)
    step = 1e-6
    wanted = np.array(
        [
            (pooled(given_weights + step * unit) - pooled(given_weights - step * unit)) / (2 * step)
            for unit in np.eye(7)
        ]
    )
    if combiner != "sum":
        assert not got[zero].any()
        wanted[zero] = 0
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


def test_members_that_a_loss_does_not_use(graph: tf.Graph):
    """They are left out of the gradient's operation, whose graph says which members it is about."""
    rng = np.random.default_rng(2)
    rows = given(rng.normal(size=12), np.float32)
    members = [
        embedding_bag.BagMember(0, 2),
        embedding_bag.BagMember(0, 2, embedding_bag.SUM),
        embedding_bag.BagMember(1, 4, embedding_bag.MEAN, True),
        embedding_bag.BagMember(0, 2),
    ]
    weights = given([1, 3], np.float32)
    outputs = embedding_bag.pool(
        rows,
        [
            given([0, 2, 0], np.int32),
            given([0, 2, 2], np.int32),
            given([4, 8], np.int32),
            given([2], np.int32),
        ],
        [given([0, 1, 1]), given([0, 0])],
        [weights],
        members,
    )
    with tf.Session() as session:
        for used in ([1], [0, 2], [3, 1], [0, 1, 2, 3]):
            gradient, of_weights = tf.gradients(
                [tf.reduce_sum(outputs[m]) * (m + 1) for m in used], [rows, weights]
            )
            members = graph_state.of(graph, PooledMembers).by_gradient
            assert members[gradient.op] == tuple(sorted(used))
            assert len([t for t in gradient.op.inputs if t.shape.rank == 2]) == len(used)
            wanted = np.zeros(12)
            for first, factor, member in (
                (0, 1, 0),
                (2, 1, 0),
                (0, 1, 0),
                (0, 2, 1),
                (2, 2, 1),
                (2, 2, 1),
                (2, 4, 3),
            ):
                wanted[first : first + 2] += factor * (member in used)
            for first, share in ((4, 0.25), (8, 0.75)):
                wanted[first : first + 4] += 3 * share * (2 in used)
            np.testing.assert_allclose(session.run(gradient), wanted, rtol=1e-6)
            assert session.run(of_weights).any() == (2 in used)
        assert tf.gradients(tf.zeros_like(outputs[0]), rows) == [None]
        assert tf.gradients(tf.stop_gradient(outputs[0]) + 1.0, rows) == [None]


def test_gradients_that_come_as_slices():
    """What `tf.gather` of an output gives."""
    rows = given(np.arange(8), np.float32)
    out = embedding_bag.pool(
        rows, [given([0, 2, 6], np.int32)], [], [], [embedding_bag.BagMember(0, 2)]
    )[0]
    with tf.Session() as session:
        got = session.run(tf.gradients(tf.gather(out, [2, 2, 0]), rows))
    np.testing.assert_array_equal(got[0], [1, 1, 0, 0, 0, 0, 2, 2])


def test_gradient_scale_is_the_one_at_the_time():
    assert shard_gradients.gradient_scale() == 1
    with embedding_bag.scaled(0.5):
        assert shard_gradients.gradient_scale() == 0.5
        with pytest.raises(ZeroDivisionError), embedding_bag.scaled(3):
            assert shard_gradients.gradient_scale() == 3 / (shard_gradients.gradient_scale() - 3)
        assert shard_gradients.gradient_scale() == 0.5
    assert shard_gradients.gradient_scale() == 1


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3, 0.0, -2.0])
def test_a_sum_is_scaled_once(scale: float):
    """Summed, then scaled: to the last bit what NumPy makes of float32."""
    rng = np.random.default_rng(0)
    ids = [np.array([4, 1, 4, 0, 2, 4]), np.array([4, 3, 0, 0])]
    built = Simulation([Table(rng.normal(size=[5, 16]))], [Lookup(0, ids)], 2)
    factors = [rng.normal(size=[len(each), 16]).astype(np.float32) for each in ids]
    with embedding_bag.scaled(scale):
        gradients = tf.gradients(
            [tf.reduce_sum(out[0] * f) for out, f in zip(built.outputs, factors)],
            [shard.handle for shard in built.shards[0]],
        )
    wanted = np.zeros([5, 16], np.float32)
    for each, factor in zip(ids, factors):
        mine = np.zeros([5, 16], np.float32)
        np.add.at(mine, each, factor)
        wanted += mine
    with started() as session:
        got = session.run(gradients)
    np.testing.assert_array_equal(
        whole(built, 0, got).astype(np.float32), np.float32(scale) * wanted
    )


def test_dense_shapes():
    """A constant, or nothing where a shard's shape isn't known."""
    asked = embedding_bag.request(
        [given([0])], [], [], [embedding_bag.BagMember(0, 2)], [embedding_bag.Section(0, 2)], [0], 1
    )
    handle = variable(np.ones([3, 2])).handle
    for shape, wanted in (([3, 2], [3, 2]), ([None, 2], None), (None, None)):
        flat = embedding_bag.gather(
            [handle],
            [given([0])],
            asked.message,
            asked.splits,
            [embedding_bag.Section(0, 2)],
            [0],
            1,
            [shape],
        )
        gradient = tf.gradients(flat, handle)[0]
        assert gradient.values.shape.as_list() == [None, 2]
        assert (gradient.dense_shape is None) == (wanted is None)
        if wanted is not None:
            assert tf.get_static_value(gradient.dense_shape).tolist() == wanted
