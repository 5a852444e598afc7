"""The three lookup functions give plain TensorFlow's values, and gradients through an update."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from hypothesis import given
from hypothesis import strategies as st

from collective import Table
from tests.ranks import reference

pytestmark = [
    pytest.mark.ranks(4),
    pytest.mark.backends("hb", "sok"),
    pytest.mark.ungrouped,
    pytest.mark.double,
]


@st.composite
def sparse_batches(draw, least=0, weighted=None):
    """Draws one global batch, [(ids, weights or None)] per sample, for up to 4 ranks.

    It doesn't depend on the rank.
    """
    rows, dim = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    samples = 12 * draw(st.integers(1, 2))
    id_values = st.integers(least, rows - 1)
    lists = draw(st.lists(st.lists(id_values, max_size=4), min_size=samples, max_size=samples))
    weights = draw(st.booleans()) if weighted is None else weighted
    floats = st.floats(-0.5 if least < 0 else 0.25, 2.0, width=16)
    values = (
        [draw(st.lists(floats, min_size=len(x), max_size=len(x))) for x in lists]
        if weights
        else None
    )
    combiner = draw(st.sampled_from(["sum", "mean", "sqrtn"]))
    max_norm = draw(st.sampled_from([None, 0.7]))
    return rows, dim, lists, values, combiner, max_norm


def sparse_feed(lists):
    at = np.array(
        [(i, j) for i, row in enumerate(lists) for j in range(len(row))], np.int64
    ).reshape(-1, 2)
    return at, np.array([x for row in lists for x in row])


def check(strategy, rank, size, lookup, rows, dim, lists, values):
    """Compares values of every sample, and all rows after a step on their weighted mean."""
    samples = len(lists) // size
    factor = np.random.default_rng(3).normal(size=(len(lists), dim)).astype(np.float32)

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", rows, dim)
        at, ids = tf.placeholder(tf.int64, [None, 2]), tf.placeholder(tf.int64, [None])
        w, f = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.float32, [None, dim])
        shape = tf.stack([tf.cast(tf.shape(f)[0], tf.int64), 5])
        ids_sparse = tf.SparseTensor(at, ids, shape)
        out = lookup(t, ids_sparse, tf.SparseTensor(at, w, shape) if values is not None else None)
        loss = (
            tf.reduce_mean(out * f[: tf.shape(out)[0]])
            if lookup.partial
            else tf.reduce_mean(out * f)
        )
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        return {"out": out, "train": train, "rows": tf.nn.embedding_lookup(t, tf.range(rows))}, {
            "at": at,
            "ids": ids,
            "w": w,
            "f": f,
        }

    def feed(lo, hi):
        at, ids = sparse_feed(lists[lo:hi])
        w = sparse_feed(values[lo:hi])[1] if values is not None else np.zeros(len(ids))
        return {"at": at, "ids": ids, "w": w, "f": factor[lo:hi]}

    whole, mine = feed(0, len(lists)), feed(rank * samples, (rank + 1) * samples)
    names = ["out"] if lookup.partial else ["out", "train"]
    want = reference.plain(build, [(names, whole), (["rows"], {})])
    got = reference.sharded(strategy, build, [(names, mine), (["rows"], {})])
    full = np.zeros((len(lists), dim), np.float32)
    full[: len(want[0]["out"])] = want[0]["out"]
    out = got[0]["out"]
    np.testing.assert_allclose(
        out, full[rank * samples : rank * samples + len(out)], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(got[1]["rows"], want[1]["rows"], rtol=1e-5, atol=1e-6)


def as_lookup(call, partial=False):
    call.partial = partial
    return call


@pytest.mark.parametrize("api", ["v1", "v2"])
@given(batch=sparse_batches(least=-2))
def test_safe_embedding_lookup_sparse(strategy, rank, size, api, batch):
    rows, dim, lists, values, combiner, max_norm = batch
    module = tf if api == "v1" else tf2
    check(
        strategy,
        rank,
        size,
        as_lookup(
            lambda t, ids, w: module.nn.safe_embedding_lookup_sparse(
                t, ids, w, combiner=combiner, max_norm=max_norm
            )
        ),
        rows,
        dim,
        lists,
        values,
    )


@given(batch=sparse_batches(), default=st.integers(0, 0))
def test_safe_embedding_lookup_sparse_with_a_default_id(strategy, rank, size, batch, default):
    rows, dim, lists, values, combiner, max_norm = batch
    check(
        strategy,
        rank,
        size,
        as_lookup(
            lambda t, ids, w: tf.nn.safe_embedding_lookup_sparse(
                [t], ids, w, combiner=combiner, default_id=default, max_norm=max_norm
            )
        ),
        rows,
        dim,
        lists,
        values,
    )


@pytest.mark.parametrize("api", ["v1", "v2"])
@given(batch=sparse_batches())
def test_embedding_lookup_sparse(strategy, rank, size, api, batch):
    rows, dim, lists, values, combiner, max_norm = batch
    module = tf if api == "v1" else tf2
    check(
        strategy,
        rank,
        size,
        as_lookup(
            lambda t, ids, w: module.nn.embedding_lookup_sparse(
                t, ids, w, combiner=combiner, max_norm=max_norm
            ),
            partial=True,
        ),
        rows,
        dim,
        lists,
        values,
    )


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@given(
    rows=st.integers(1, 30),
    dim=st.integers(1, 6),
    inner=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 999),
    max_norm=st.sampled_from([None, 0.7]),
    listed=st.booleans(),
)
def test_embedding_lookup(strategy, rank, size, dtype, rows, dim, inner, seed, max_norm, listed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, rows, [12, *inner])
    factor = rng.normal(size=[12, *inner, dim]).astype(np.float32)

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", rows, dim)
        p, f = (
            tf.placeholder(dtype, [None, *inner]),
            tf.placeholder(tf.float32, [None, *inner, dim]),
        )
        out = tf.nn.embedding_lookup([t] if listed else t, p, max_norm=max_norm)
        assert out.shape.as_list() == [None, *inner, dim]
        train = tf.train.AdagradOptimizer(0.5).minimize(tf.reduce_sum(out * f) / 12.0)
        return {"out": out, "train": train, "rows": tf.nn.embedding_lookup(t, np.arange(rows))}, {
            "p": p,
            "f": f,
        }

    want = reference.plain(build, [(["out", "train"], {"p": ids, "f": factor}), (["rows"], {})])
    # the loss above is a sum over the batch: a rank's part must be divided by its own number of
    # samples
    got = reference.sharded(
        strategy,
        build,
        [
            (
                ["out", "train"],
                {
                    "p": reference.part(ids, rank, size),
                    "f": reference.part(factor * size, rank, size),
                },
            ),
            (["rows"], {}),
        ],
    )
    np.testing.assert_allclose(
        got[0]["out"], reference.part(want[0]["out"], rank, size), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(got[1]["rows"], want[1]["rows"], rtol=2e-4, atol=1e-5)


def test_arguments_without_effect(strategy, rank, size):
    """How TensorFlow would cut a variable into pieces, of which a table is one."""

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 7, 3)
        ids, bags = tf.constant([6, 0, 3, 3]), tf.sparse.from_dense([[1, 6], [2, 0]])
        return {
            "rows": tf.nn.embedding_lookup(t, ids, "div", validate_indices=False),
            "pooled": tf.nn.embedding_lookup_sparse(t, bags, None, "div", combiner="sum"),
            "safe": tf.nn.safe_embedding_lookup_sparse([t], bags, partition_strategy="mod"),
        }, {}

    names = ["rows", "pooled", "safe"]
    got, want = (
        reference.sharded(strategy, build, [(names, {})])[0],
        reference.plain(build, [(names, {})])[0],
    )
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)


@given(
    rows=st.integers(1, 9),
    dim=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
)
def test_ragged_ids(strategy, rows, dim, lengths, seed, combiner):
    values = np.random.default_rng(seed).integers(0, rows, sum(lengths))

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", rows, dim)
        ids = tf.RaggedTensor.from_row_lengths(tf.constant(values), lengths)
        return {
            "rows": tf.nn.embedding_lookup(t, ids).flat_values,
            "pooled": tf.nn.embedding_lookup_sparse(t, ids, None, combiner=combiner),
            "safe": tf.nn.safe_embedding_lookup_sparse(t, ids, None, combiner=combiner),
        }, {}

    names = ["rows", "pooled", "safe"]
    got, want = (
        reference.sharded(strategy, build, [(names, {})])[0],
        reference.plain(build, [(names, {})])[0],
    )
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_gather_and_columns_are_lookups(strategy, rank, size):
    """tf.gather ends in a lookup; input_layer over embedding columns in
    safe_embedding_lookup_sparse.
    """
    ids = np.arange(12) % 7

    def build(embedding_scope):
        p = tf.placeholder(tf.int64, [None])
        with (
            embedding_scope(),
            tf.variable_scope("outer", partitioner=tf.fixed_size_partitioner(strategy.world_size)),
        ):
            t = reference.table("t", 7, 3)
            columns = [
                tf.feature_column.embedding_column(
                    tf.feature_column.categorical_column_with_identity("x", 7),
                    d,
                    initializer=tf.constant_initializer(reference.table_values(7, d)),
                )
                for d in (2, 4)
            ]
            layer = tf.feature_column.input_layer({"x": p}, columns[:1])
            shared = tf.feature_column.shared_embedding_columns(
                [tf.feature_column.categorical_column_with_identity("x", 7)],
                4,
                initializer=tf.constant_initializer(reference.table_values(7, 4)),
            )
            layer2 = tf.feature_column.input_layer({"x": p}, shared)
        return {"gather": tf.gather(t, p), "layer": layer, "shared": layer2}, {"p": p}

    names = ["gather", "layer", "shared"]
    mine = reference.part(ids, rank, size)
    got = reference.sharded(strategy, build, [(names, {"p": mine})])[0]
    for name, dim in zip(names, (3, 2, 4)):
        np.testing.assert_allclose(got[name], reference.table_values(7, dim)[mine], rtol=1e-6)


def test_a_norm_that_is_a_tensor(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 9, 3)
        ids, most = tf.placeholder(tf.int64, [None]), tf.constant(0.5)
        rows = tf.nn.embedding_lookup(t, ids, max_norm=most)
        sparse = tf.SparseTensor(
            tf.stack([tf.range(tf.size(ids, out_type=tf.int64)), tf.zeros_like(ids)], 1),
            ids,
            [12, 1],
        )
        rows += tf.nn.embedding_lookup_sparse(t, sparse, None, combiner="sum", max_norm=most)
        train = tf.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_mean(tf.square(rows)))
        return {"train": train, "rows": tf.nn.embedding_lookup(t, tf.range(9))}, {"ids": ids}

    # Every number of ranks to 4 divides them.
    ids = np.array([1, 2, 2, 8, 0, 5, 3, 3, 7, 1, 6, 4])
    want = reference.plain(build, [(["train"], {"ids": ids}), (["rows"], {})])
    got = reference.sharded(
        strategy, build, [(["train"], {"ids": reference.part(ids, rank, size)}), (["rows"], {})]
    )
    np.testing.assert_allclose(got[1]["rows"], want[1]["rows"], rtol=2e-5)


def test_a_rank_may_ask_for_nothing(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 5, 2)
        p = tf.placeholder(tf.int64, [None])
        out = tf.nn.embedding_lookup(t, p)
        train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(out))
        return {"out": out, "train": train, "rows": tf.nn.embedding_lookup(t, np.arange(5))}, {
            "p": p
        }

    ids = [] if rank else [1, 1, 4]
    got = reference.sharded(strategy, build, [(["out", "train"], {"p": ids}), (["rows"], {})])
    values = reference.table_values(5, 2)
    np.testing.assert_array_equal(got[0]["out"], values[ids].reshape(-1, 2))
    moved = values.copy()
    moved[1] -= 2.0 / size
    moved[4] -= 1.0 / size
    np.testing.assert_allclose(got[1]["rows"], moved, rtol=1e-6)


def test_half_precision_tables(strategy, rank):
    for dtype in (tf.float16, tf.bfloat16, tf.float64):
        with strategy.scope(), tf.Graph().as_default():
            with strategy.embedding_scope():
                t = tf.get_variable("t", [6, 4], dtype, initializer=tf.ones_initializer())
            assert isinstance(t, Table)
            out = tf.nn.embedding_lookup(t, [rank, 5])
            train = tf.train.GradientDescentOptimizer(0.5).minimize(
                tf.reduce_sum(tf.cast(out, tf.float32))
            )
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train)
                moved = session.run(tf.cast(tf.nn.embedding_lookup(t, [5]), tf.float32))
        # the ranks' parts of the gradient are rounded to the table's precision before they are
        # added
        np.testing.assert_allclose(
            moved, 0.5, rtol={tf.float16: 1e-3, tf.bfloat16: 8e-3}.get(dtype, 1e-7)
        )


def test_double_precision_tables_train_in_double_precision(strategy):
    def build(embedding_scope):
        with embedding_scope():
            t = tf.get_variable("t", [6, 2], tf.float64, initializer=tf.ones_initializer())
        ids, rows = tf.placeholder(tf.int64, [None]), tf.nn.embedding_lookup(t, tf.range(6))
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids) - 1 / 3))
        return {"train": tf.train.AdagradOptimizer(0.1).minimize(loss), "rows": rows}, {"ids": ids}

    runs = [(["train"], {"ids": np.arange(6) % (3 + k)}) for k in range(3)] + [(["rows"], {})]
    want, got = (reference.plain(build, runs), reference.sharded(strategy, build, runs))
    np.testing.assert_allclose(got[-1]["rows"], want[-1]["rows"], rtol=0, atol=1e-13)


def test_a_half_precision_row_is_rounded_once_a_step(strategy):
    """Gradient descent adds up the small steps of a repeated key: each alone would be lost."""

    def build(embedding_scope):
        with embedding_scope():
            t = tf.get_variable("t", [2, 1], tf.bfloat16, initializer=tf.ones_initializer())
        ids = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.cast(tf.nn.embedding_lookup(t, ids), tf.float32))
        train = tf.train.GradientDescentOptimizer(2.0**-9).minimize(loss)
        row = tf.cast(tf.nn.embedding_lookup(t, [0])[0, 0], tf.float32)
        return {"train": train, "row": row}, {"ids": ids}

    runs = [(["train"], {"ids": np.zeros(48, np.int64)}), (["row"], {})]
    # 1 - 2**-9 is 1 in bfloat16, whose numbers below 1 are 2**-8 apart.
    assert reference.plain(build, runs)[-1]["row"] == 1
    assert reference.sharded(strategy, build, runs)[-1]["row"] == 1 - 48 * 2.0**-9


def test_bad_arguments_are_named(strategy):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t, u = reference.table("t", 5, 2), reference.table("u", 5, 2)
        with pytest.raises(TypeError, match="table 't': ids must be integers, not float32"):
            tf.nn.embedding_lookup(t, [0.5])
        with pytest.raises(ValueError, match="'t' and 'u'"):
            tf.nn.embedding_lookup([t, u], [1])
        sparse = tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1])
        with pytest.raises(ValueError, match="combiner"):
            tf.nn.embedding_lookup_sparse(t, sparse, None, combiner="max")
        with pytest.raises(TypeError, match="SparseTensor"):
            tf.nn.embedding_lookup_sparse(t, tf.constant([[1]]), None)
