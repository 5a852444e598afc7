"""SparseOperationKit's own function tests hold: many pooled ids a sample, 100 steps of descent.

In addition, variables that plain TensorFlow holds whole are trained on the whole batches. A
difference is measured as those tests do, squared and normalised: |a - b|² / |b|².
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import reference
from tests.ranks.grouped import padded

pytestmark = pytest.mark.backends("hb", "sok")

ROWS, BATCH, STEPS = (800, 500), 24, 100
DIMENSIONS, HOTNESS = (128, 4), (10, 3)  # of the first and the second table


def batches():
    """Draws both tables' ids [BATCH, hotness], from 1 to hotness of them a sample, and weights."""
    rng = np.random.default_rng(100)
    feeds = []
    for _ in range(STEPS):
        feed = {
            f"ids{i}": padded(rng, rows, most, samples=BATCH)
            for i, (rows, most) in enumerate(zip(ROWS, HOTNESS))
        }
        feed.update(
            {
                f"weights{i}": rng.uniform(0.5, 1.5, (BATCH, most)).astype(np.float32)
                for i, most in enumerate(HOTNESS)
            }
        )
        feeds.append(feed)
    return feeds


def build(embedding_scope, combiners, weighted, dynamic):
    """Builds two tables, trained to bring a network's output to the samples' first id."""
    ones = tf.ones_initializer()
    with embedding_scope():
        tables = [
            tf.get_variable(f"t{i}", [None if dynamic else rows, dim], initializer=ones)
            for i, (rows, dim) in enumerate(zip(ROWS, DIMENSIONS))
        ]
    p, pooled = {}, []
    for i, (table, combiner, most) in enumerate(zip(tables, combiners, HOTNESS)):
        p[f"ids{i}"] = ids = tf.placeholder(tf.int64, [None, most])
        p[f"weights{i}"] = weights = tf.placeholder(tf.float32, [None, most])
        places, shape = tf.where(ids >= 0), tf.shape(ids, out_type=tf.int64)
        pooled.append(
            tf.nn.embedding_lookup_sparse(
                table,
                tf.SparseTensor(places, tf.gather_nd(ids, places), shape),
                tf.SparseTensor(places, tf.gather_nd(weights, places), shape) if weighted else None,
                combiner=combiner,
            )
        )
    first = tf.cast(p["ids0"][:, 0], tf.float32)[:, None] / ROWS[0]
    losses = [
        tf.reduce_mean(tf.square(rows / scale - first)) for rows, scale in zip(pooled, HOTNESS)
    ]
    return {
        "train": tf.train.GradientDescentOptimizer(1000.0).minimize(tf.add_n(losses)),
        "pooled": pooled,
        "rows": [
            tf.nn.embedding_lookup(table, tf.range(rows)) for table, rows in zip(tables, ROWS)
        ],
    }, p


def difference(got, want):
    return np.sum((got - want) ** 2, dtype=np.float64) / np.sum(want**2, dtype=np.float64)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiners", [("mean", "sum"), ("sum", "mean")])
def test_a_hundred_steps_with_replicated_variables(
    strategy, rank, size, combiners, weighted, dynamic
):
    feeds = batches()
    runs = [(["train", "pooled"], feed) for feed in feeds]
    mine = [
        (names, {key: reference.part(value, rank, size) for key, value in feed.items()})
        for names, feed in runs
    ]
    want = reference.plain(
        lambda scope: build(scope, combiners, weighted, False), [*runs, (["rows"], {})]
    )
    got = reference.sharded(
        strategy, lambda scope: build(scope, combiners, weighted, dynamic), [*mine, (["rows"], {})]
    )
    for i in range(2):
        for a, b in zip(got[:-1], want):
            assert difference(a["pooled"][i], reference.part(b["pooled"][i], rank, size)) < 1e-6
        # A dynamic table has the rows that training met.
        met = np.unique([feed[f"ids{i}"] for feed in feeds])
        met = met[met >= 0]
        rows, whole = got[-1]["rows"][i], want[-1]["rows"][i]
        assert difference(rows[met], whole[met]) < 1e-6 and np.abs(whole[met] - 1.0).mean() > 0.05
