"""Compares an exchange's compiled operations on simulated ranks with lookups on whole tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from bag_exchange import Lookup, Simulation, Table, dense, started, whole

from collective.ops.exchange import embedding_bag

EXTREMES = np.array(
    [-(2**63), -(2**63) + 1, -(2**62), -1, 0, 1, 2**31, 2**32, 2**62, 2**63 - 2, 2**63 - 1]
)


@pytest.fixture(autouse=True)
def graph(computing: str) -> Any:
    with tf.Graph().as_default() as made:
        yield made


def check(tables: list[Table], lookups: list[Lookup], ranks: int, scale: float = 1.0) -> None:
    """Values, gradients of tables and of weights. Sums are formed in another order than plain
    TensorFlow's: the tolerance.
    """
    built = Simulation(tables, lookups, ranks)
    rng = np.random.default_rng(8)

    def loss(outputs: list[list[tf.Tensor]]) -> tf.Tensor:
        return tf.add_n(
            [
                tf.reduce_sum(tf.sin(o) * factor + tf.square(o))
                for each in outputs
                for o, factor in zip(each, factors)
            ]
        )

    factors = [
        tf.constant(rng.normal(size=[tables[lookup.table].rows.shape[1]]), tf.float32)
        for lookup in lookups
    ]
    handles = [shard.handle for shards in built.shards for shard in shards]
    # The weights of a section are not differentiable: those of its member are constants.
    weights = [
        w
        for each in built.weights
        for w, lookup in zip(each, lookups)
        if w is not None and not lookup.by_owner
    ]
    plain_weights = [
        w
        for each in built.plain_weights
        for w, lookup in zip(each, lookups)
        if w is not None and not lookup.by_owner
    ]
    with embedding_bag.scaled(scale):
        gradients = tf.gradients(loss(built.outputs), [*handles, *weights])
    wanted = tf.gradients(loss(built.plain), [*built.tables, *plain_weights])
    with started() as session:
        outputs, plain = session.run([built.outputs, built.plain])
        for got, want in zip(outputs, plain):
            for i, (one, other) in enumerate(zip(got, want)):
                assert one.shape == other.shape, lookups[i]
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        got, want = run_some(session, gradients), run_some(session, wanted)
    for t, table in enumerate(tables):
        np.testing.assert_allclose(
            whole(built, t, got[t * ranks : (t + 1) * ranks]),
            scale * dense(want[t], table.rows.shape),
            rtol=2e-5,
            atol=2e-5,
        )
    for one, other in zip(got[len(handles) :], want[len(tables) :]):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def run_some(session: tf.Session, fetches: list[Any]) -> list[Any]:
    """Returns their values; None for those that are None."""
    values = iter(session.run([fetch for fetch in fetches if fetch is not None]))
    return [None if fetch is None else next(values) for fetch in fetches]


def random_samples(rng: np.random.Generator, ids: int, most: int = 7) -> np.ndarray:
    return np.sort(rng.integers(0, most, ids))


def random_lookup(
    rng: np.random.Generator, tables: list[Table], ranks: int, most: int = 30
) -> Lookup:
    table = int(rng.integers(len(tables)))
    combiner = rng.choice(np.array([None, "sum", "mean", "sqrtn"], object))
    counts = [int(rng.integers(0, most)) for _ in range(ranks)]
    samples = [random_samples(rng, count) for count in counts]
    weighted = combiner is not None and rng.random() < 0.4
    # Not both signs: sums that cancel would magnify rounding. Zeros are among them.
    weights = [rng.choice([0.0, 0.5, 1.0, 3.0], count) for count in counts]
    return Lookup(
        table,
        [rng.integers(0, len(tables[table].rows), count) for count in counts],
        combiner,
        None if combiner is None else samples,
        weights if weighted else None,
        float(rng.choice([0.5, 2.0])) if rng.random() < 0.3 else None,
        combiner is not None and rng.random() < 0.4,
    )


def random_table(rng: np.random.Generator) -> Table:
    rows = int(rng.choice([1, 2, 11, 60]))
    table = Table(
        rng.normal(size=[rows, int(rng.choice([1, 2, 3, 8, 16, 21, 32, 64, 128, 130]))]).astype(
            np.float32
        )
    )
    if rng.random() < 0.4:
        pool = np.concatenate([EXTREMES, rng.integers(-(2**63), 2**63 - 1, 99)])
        table.keys = np.sort(rng.choice(np.unique(pool), rows, replace=False))
    return table


@pytest.mark.parametrize(
    "seed",
    [
        1,
        *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (2, 3, 8)),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, *range(4, 8), *range(9, 16))),
    ],
)
def test_random_lookups(seed: int):
    rng = np.random.default_rng(seed)
    ranks = (1, 2, 3, 5)[seed % 4]
    tables = [random_table(rng) for _ in range(4)]
    lookups = [random_lookup(rng, tables, ranks) for _ in range(9)]
    check(tables, lookups, ranks, scale=(1.0, 1 / ranks)[seed // 8])


def same(ranks: int, *values: Any) -> list[np.ndarray]:
    return [np.array(values, np.int64)] * ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 2, 5))]
)
def test_special_ids(ranks: int):
    rng = np.random.default_rng(ranks)
    static = Table(rng.normal(size=[40, 16]))
    dynamic = Table(rng.normal(size=[len(EXTREMES), 3]), EXTREMES)
    nothing, one = same(ranks), same(ranks, 7)
    equal, distinct = same(ranks, *[5] * 12), same(ranks, *rng.permutation(40)[:30])
    of_equal, of_distinct = same(ranks, *[0] * 6, *[3] * 6), same(ranks, *np.arange(30) // 4 + 2)
    extremes = [rng.permutation(len(EXTREMES)) for _ in range(ranks)]
    for by_owner in (False, True):
        lookups = [
            Lookup(0, equal, "mean", of_equal, by_owner=by_owner),
            Lookup(0, distinct, "sum", of_distinct, by_owner=by_owner),
            Lookup(0, one, "sqrtn", same(ranks, 4), by_owner=by_owner),
            Lookup(0, nothing, "sum", nothing, by_owner=by_owner),
            Lookup(0, nothing),
            Lookup(0, one),
            Lookup(0, equal),
            Lookup(0, distinct),
            Lookup(1, extremes),
            Lookup(1, extremes, "mean", [np.arange(len(EXTREMES)) // 3] * ranks, by_owner=by_owner),
        ]
        check([static, dynamic], lookups, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_at_all(ranks: int):
    tables = [Table(np.ones([4, 3])), Table(np.ones([4, 5]))]
    check(
        tables,
        [
            Lookup(0, same(ranks)),
            Lookup(1, same(ranks), "mean", same(ranks)),
            Lookup(1, same(ranks), "sum", same(ranks), same(ranks), by_owner=True),
        ],
        ranks,
    )


@pytest.mark.parametrize("computing", ["compiled"], indirect=True)
@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_themselves(ranks: int, emulated: None):
    """All ways to combine rows, by either side, some of it weighted or clipped, of tables of
    several dimensions.
    """
    rng = np.random.default_rng(ranks)
    tables = [
        Table(rng.normal(size=[9, 3])),
        Table(rng.normal(size=[7, 8])),
        Table(rng.normal(size=[5, 4]), EXTREMES[:5]),
    ]
    samples = [np.sort(rng.integers(0, 5, 9)) for _ in range(ranks)]
    weights = [rng.uniform(0.5, 2, 9) for _ in range(ranks)]

    def ids(most: int) -> list[np.ndarray]:
        return [rng.integers(0, most, 9) for _ in range(ranks)]

    lookups = [
        Lookup(0, ids(9)),
        Lookup(1, ids(7), "mean", samples, weights, max_norm=0.5),
        Lookup(2, ids(5), "sqrtn", samples),
        Lookup(0, ids(9), "sum", samples, by_owner=True),
        Lookup(1, ids(7), "sqrtn", samples, weights, max_norm=0.9, by_owner=True),
        Lookup(2, same(ranks), "mean", same(ranks)),
    ]
    check(tables, lookups, ranks, scale=0.5)


def test_one_rank_without_ids():
    rng = np.random.default_rng(0)
    ids = [np.array([], np.int64), np.array([3, 1, 3]), np.array([], np.int64)]
    samples = [np.array([], np.int64), np.array([1, 1, 2]), np.array([], np.int64)]
    check(
        [Table(rng.normal(size=[4, 8]))],
        [
            Lookup(0, ids),
            Lookup(0, ids, "mean", samples),
            Lookup(0, ids, "sqrtn", samples, by_owner=True),
        ],
        3,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("by_owner", [False, True])
def test_weights_below_zero_and_of_zero(by_owner: bool):
    rng = np.random.default_rng(0)
    ids, samples = same(2, *rng.integers(0, 9, 9)), same(2, 0, 0, 0, 1, 1, 2, 2, 5, 5)
    weights = [
        np.array([1.0, -0.25, 0, 0, 0, -3, 1, -1, 4]),
        np.array([-1.0, -0.25, 0, 2, 0, 0, 1, -1, 4]),
    ]
    for combiner in ("sum", "mean", "sqrtn"):
        # TensorFlow's own gradient of weights whose squares sum up to 0 is no number (see
        # test_bags_gradients).
        used = (
            [np.abs(w) + 0.5 for w in weights] if combiner == "sqrtn" and not by_owner else weights
        )
        check(
            [Table(rng.normal(size=[9, 5]))],
            [Lookup(0, ids, combiner, samples, used, by_owner=by_owner)],
            2,
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("by_owner", [False, True])
def test_rows_that_are_clipped(by_owner: bool):
    """To a norm that some exceed, that some have, and rows of zeros."""
    rows = np.concatenate(
        [
            np.zeros([2, 4]),
            np.eye(4) * 2,
            np.full([2, 4], 1.0),
            np.random.default_rng(0).normal(size=[8, 4]),
        ]
    )
    ids, samples = same(2, *range(16), *range(16)), same(2, *np.arange(32) // 5)
    for weights in (None, [np.linspace(-1, 2, 32)] * 2):
        for combiner in ("sum", "mean", "sqrtn"):
            check([Table(rows)], [Lookup(0, ids, combiner, samples, weights, 2.0, by_owner)], 2)
    check(
        [Table(rows)],
        [Lookup(0, ids, max_norm=2.0), Lookup(0, ids, max_norm=0.1), Lookup(0, ids)],
        2,
    )


@pytest.mark.parametrize("computing", ["compiled"], indirect=True)
def test_many_ids_on_several_threads(monkeypatch: pytest.MonkeyPatch):
    """The same bits on one thread and on four, and in each run."""
    rng = np.random.default_rng(0)
    tables = [
        Table(rng.normal(size=[rows, dim])) for rows, dim in ((100000, 16), (50, 64), (3000, 7))
    ]
    tables[2].keys = np.sort(rng.choice(2**62, 3000, replace=False))
    lookups = []
    for table, by_owner in (
        (0, False),
        (1, False),
        (2, False),
        (0, True),
        (1, True),
        (2, True),
        (0, False),
    ):
        ids = [rng.zipf(1.3, 6000) % len(tables[table].rows) for _ in range(2)]
        lookups.append(
            Lookup(
                table,
                ids,
                "mean",
                [np.sort(rng.integers(0, 1500, 6000)) for _ in ids],
                by_owner=by_owner,
            )
        )
    built = Simulation(tables, lookups, 2)
    total = tf.add_n([tf.reduce_sum(tf.sin(o)) for each in built.outputs for o in each])
    with embedding_bag.scaled(1 / 3):
        gradients = tf.gradients(
            total, [shard.handle for shards in built.shards for shard in shards]
        )
    wanted = tf.gradients(
        tf.add_n([tf.reduce_sum(tf.sin(o)) for each in built.plain for o in each]), built.tables
    )
    results = []
    for threads in (1, 4):
        config = tf.ConfigProto(
            intra_op_parallelism_threads=threads,
            inter_op_parallelism_threads=1,
            use_per_session_threads=True,
        )
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            results += [session.run([built.asked, built.outputs, gradients]) for _ in range(2)]
            plain = session.run([built.plain, wanted])
    for other in results[1:]:
        tf.nest.map_structure(np.testing.assert_array_equal, results[0], other)
    for got, want in zip(results[0][1], plain[0]):
        for one, another in zip(got, want):
            np.testing.assert_allclose(one, another, rtol=1e-4, atol=1e-5)
    for t, table in enumerate(tables):
        np.testing.assert_allclose(
            whole(built, t, results[0][2][2 * t : 2 * t + 2]),
            dense(plain[1][t], table.rows.shape) / 3,
            rtol=1e-4,
            atol=1e-4,
        )
