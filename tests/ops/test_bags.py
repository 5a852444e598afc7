"""The compiled operations of an exchange among simulated ranks, against plain lookups on whole tables."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from bag_exchange import Lookup, Simulation, Table, dense, started, whole

from collective.ops import bags

EXTREMES = np.array([-2 ** 63, -2 ** 63 + 1, -2 ** 62, -1, 0, 1, 2 ** 31, 2 ** 32, 2 ** 62, 2 ** 63 - 2, 2 ** 63 - 1])


@pytest.fixture(autouse=True)
def graph() -> Any:
    with tf.Graph().as_default() as made:
        yield made


def check(tables: list[Table], lookups: list[Lookup], ranks: int, scale: float = 1.) -> None:
    """Values, gradients of tables and of weights. Sums are formed in another order than plain TensorFlow's: hence the tolerance."""
    built = Simulation(tables, lookups, ranks)
    rng = np.random.default_rng(8)

    def loss(outputs: list[list[tf.Tensor]]) -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(tf.sin(o) * factor + tf.square(o)) for each in outputs for o, factor in zip(each, factors)])

    factors = [tf.constant(rng.normal(size=[tables[lookup.table].rows.shape[1]]), tf.float32) for lookup in lookups]
    handles = [shard.handle for shards in built.shards for shard in shards]
    # The weights of a section are not differentiable: those of its member are constants.
    weights = [w for each in built.weights for w, lookup in zip(each, lookups) if w is not None and not lookup.by_owner]
    plain_weights = [w for each in built.plain_weights for w, lookup in zip(each, lookups) if w is not None and not lookup.by_owner]
    with bags.scaled(scale):
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
        np.testing.assert_allclose(whole(built, t, got[t * ranks:(t + 1) * ranks]), scale * dense(want[t], table.rows.shape),
                                   rtol=2e-5, atol=2e-5)
    for one, other in zip(got[len(handles):], want[len(tables):]):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def run_some(session: tf.Session, fetches: list[Any]) -> list[Any]:
    """Their values; None for those that are None."""
    values = iter(session.run([fetch for fetch in fetches if fetch is not None]))
    return [None if fetch is None else next(values) for fetch in fetches]


def random_samples(rng: np.random.Generator, ids: int, most: int = 7) -> np.ndarray:
    return np.sort(rng.integers(0, most, ids))


def random_lookup(rng: np.random.Generator, tables: list[Table], ranks: int, most: int = 30) -> Lookup:
    table = int(rng.integers(len(tables)))
    combiner = rng.choice(np.array([None, 'sum', 'mean', 'sqrtn'], object))
    counts = [int(rng.integers(0, most)) for _ in range(ranks)]
    samples = [random_samples(rng, count) for count in counts]
    weighted = combiner is not None and rng.random() < .4
    # Not both signs: sums that cancel would magnify rounding. Zeros are among them.
    weights = [rng.choice([0., .5, 1., 3.], count) for count in counts]
    return Lookup(table, [rng.integers(0, len(tables[table].rows), count) for count in counts], combiner,
                  None if combiner is None else samples, weights if weighted else None,
                  float(rng.choice([.5, 2.])) if rng.random() < .3 else None, combiner is not None and rng.random() < .4)


def random_table(rng: np.random.Generator) -> Table:
    rows = int(rng.choice([1, 2, 11, 60]))
    table = Table(rng.normal(size=[rows, int(rng.choice([1, 2, 3, 8, 16, 21, 32, 64, 128, 130]))]).astype(np.float32))
    if rng.random() < .4:
        pool = np.concatenate([EXTREMES, rng.integers(-2 ** 63, 2 ** 63 - 1, 99)])
        table.keys = np.sort(rng.choice(np.unique(pool), rows, replace=False))
    return table


@pytest.mark.parametrize('seed', range(16))
def test_random_lookups(seed: int):
    rng = np.random.default_rng(seed)
    ranks = (1, 2, 3, 5)[seed % 4]
    tables = [random_table(rng) for _ in range(4)]
    lookups = [random_lookup(rng, tables, ranks) for _ in range(9)]
    check(tables, lookups, ranks, scale=(1., 1 / ranks)[seed // 8])
