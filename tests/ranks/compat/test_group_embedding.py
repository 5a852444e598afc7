"""DeepRec's grouped lookups equal TensorFlow's own, one by one."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from tests.ranks import grouped, reference

IDS = np.array([[4, 1, 0], [2, 2, 8], [7, 0, 0], [1, 5, 3], [0, 0, 0], [6, 8, 1]])
LENGTHS = np.array([2, 3, 1, 3, 0, 2])
WEIGHTS = np.random.default_rng(4).uniform(0.5, 2, IDS.shape).astype(np.float32)
FEED = {"ids": IDS, "lengths": LENGTHS, "weights": WEIGHTS}


def tables(embedding_scope):
    p = {
        "ids": tf.placeholder(tf.int64, [None, 3]),
        "lengths": tf.placeholder(tf.int64, [None]),
        "weights": tf.placeholder(tf.float32, [None, 3]),
    }
    with embedding_scope():
        return [reference.table(name, 9, dim, dim) for name, dim in (("a", 2), ("b", 3))], p


def trained(found, ts, p):
    train = tf.train.GradientDescentOptimizer(0.5).minimize(
        sum(tf.reduce_sum(tf.square(x - 0.2)) / tf.cast(tf.shape(x)[0], tf.float32) for x in found)
    )
    return {"train": train, "a": ts[0], "b": ts[1]}, p


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_pooled(strategy, rank, size, ragged, weighted):
    def inputs(p):
        ids, weights = (
            tf.RaggedTensor.from_tensor(p[name], p["lengths"]) for name in ("ids", "weights")
        )
        return (ids, weights) if ragged else (ids.to_sparse(), weights.to_sparse())

    def build(embedding_scope, together):
        ts, p = tables(embedding_scope)
        ids, weights = inputs(p)
        if together:
            weights = [weights, None] if weighted else None
            found = collective.group_embedding_lookup_sparse(
                ts, [ids, ids], ["sum", "mean"], weights
            )
        else:
            ids, weights = (x.to_sparse() if ragged else x for x in (ids, weights))
            found = [
                tf.nn.safe_embedding_lookup_sparse(
                    ts[0], ids, weights if weighted else None, combiner="sum"
                ),
                tf.nn.safe_embedding_lookup_sparse(ts[1], ids, None, combiner="mean"),
            ]
        return trained(found, ts, p)

    compare(strategy, rank, size, build)


@pytest.mark.slow
def test_sequences_and_dense_ids(strategy, rank, size):
    def build(embedding_scope, together):
        ts, p = tables(embedding_scope)
        ragged = tf.RaggedTensor.from_tensor(p["ids"], p["lengths"])
        if together:
            found = collective.group_embedding_lookup_sparse(
                [ts[0]], [ragged], ["sum"], is_sequence=True
            )
            found += collective.group_embedding_lookup(ts, [p["ids"], p["lengths"]])
        else:
            mask = tf.sequence_mask(p["lengths"], tf.reduce_max(p["lengths"]), tf.float32)[
                ..., None
            ]
            found = [
                tf.nn.embedding_lookup(ts[0], p["ids"])[:, : tf.reduce_max(p["lengths"])] * mask,
                tf.nn.embedding_lookup(ts[0], p["ids"]),
                tf.nn.embedding_lookup(ts[1], p["lengths"]),
            ]
        return trained(found, ts, p)

    compare(strategy, rank, size, build)


def compare(strategy, rank, size, build):
    want = reference.plain(
        lambda scope: build(scope, False), [(["train"], FEED)] * 2 + [(["a", "b"], {})]
    )
    mine = {name: reference.part(value, rank, size) for name, value in FEED.items()}
    got = reference.sharded(
        strategy, lambda scope: build(scope, True), [(["train"], mine)] * 2 + [(["a", "b"], {})]
    )
    grouped.same(got[2], want[2])


def test_a_scope_for_columns(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with collective.feature_column.group_embedding_column_scope(name="item"):
            column = tf.feature_column.embedding_column(
                tf.feature_column.categorical_column_with_identity("x", 9), 2
            )
        with strategy.embedding_scope():
            out = tf.feature_column.input_layer({"x": tf.constant([1, 2])}, [column])
        assert out.shape.as_list() == [2, 2]


def test_lists_of_different_lengths_are_refused(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ts, p = tables(contextlib.nullcontext)
        with pytest.raises(ValueError, match="one of ids for each of params, .* 1 and 2"):
            collective.group_embedding_lookup(ts, [p["ids"]])
        with pytest.raises(ValueError, match="one of combiners for each of params, .* 3 and 2"):
            collective.group_embedding_lookup_sparse(ts, [1, 2], ["sum"] * 3)
