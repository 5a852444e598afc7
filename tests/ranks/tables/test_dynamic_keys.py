"""Dynamic tables take any int64 for a key, in any order, and strings."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from hypothesis import given
from hypothesis import strategies as st

import collective
from collective import TableError
from collective.ops import placement
from tests.ranks.dynamic_tables import EXTREME, D, V, drawn, normal, touch

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.double("matrix")]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "init",
    [
        tf.zeros_initializer(),
        tf.ones_initializer(),
        tf.constant_initializer(2.5),
        tf.constant_initializer([1.0, 2.0, 3.0]),
        tf.random_uniform_initializer(-1, 1),
        tf.random_normal_initializer(),
        tf.truncated_normal_initializer(),
        tf.variance_scaling_initializer(mode="fan_out"),
    ],
    ids=lambda i: type(i).__name__,
)
def test_initial_rows_are_those_of_the_static_table(strategy, init):
    static = (
        init
        if not isinstance(getattr(init, "value", 0), list)
        else tf.constant_initializer(np.tile(init.value, (V, 1)))
    )
    found = []
    for shape, use in (([V, D], static), ([None, D], init)):
        with strategy.scope(), tf.Graph().as_default():
            tf.set_random_seed(7)
            with strategy.embedding_scope():
                t = tf.get_variable("t", shape, initializer=use)
            train, rows = touch(t, np.arange(V))
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train)
                found.append(session.run(rows))
    np.testing.assert_array_equal(found[0], found[1])


def test_extreme_keys_and_the_same_key_new_on_every_rank(strategy, rank, size):
    """All ranks ask for all keys in one step, in another order each: one row for each key, moved by
    the mean gradient.
    """
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = tf.get_variable("t", [None, D], initializer=normal())
        p = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(t, p)
        train = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows))
        total, sizes = t.total_count(), collective.embedding_sizes()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(rows, {p: EXTREME}), 0)
            assert session.run(total) == 0
            session.run(train, {p: np.roll(EXTREME, rank)})
            assert session.run(total) == len(EXTREME)
            moved = drawn(EXTREME) - 0.1 / np.sqrt(1.1, dtype=np.float32)
            np.testing.assert_allclose(session.run(rows, {p: EXTREME}), moved, rtol=1e-5, atol=1e-6)
            owners = placement.dynamic(size).owner(EXTREME)
            assert session.run(sizes)["t"].tolist() == np.bincount(owners, minlength=size).tolist()
            np.testing.assert_array_equal(session.run(t.owners(tf.constant(EXTREME))), owners)
    assert len(np.unique(drawn(EXTREME), axis=0)) == len(EXTREME)


def test_huge_keys_start_from_rows_of_their_own(strategy):
    """k * D + d goes round for huge keys: key 2**63 would be key 0, were the upper half not a
    stream of its own.
    """
    keys = np.array([0, 2**62, -(2**63), -(2**62), 2**32, 2**33], np.int64)
    rows = drawn(keys, dim=4)
    assert len(np.unique(rows)) == rows.size
    many = drawn(np.arange(3000) - 2**62, dim=8)
    assert (
        abs(many.mean()) < 5 * 0.44 / many.size**0.5 and abs(many.std() / (0.5 * 0.8796) - 1) < 0.02
    )


@pytest.mark.slow
@given(data=st.data())
def test_any_keys_in_any_order(strategy, rank, size, data):
    """Each rank has keys of its own, some of them none: every key has its row, whichever rank
    brought it and when.
    """
    key = st.one_of(
        st.sampled_from([int(k) for k in EXTREME]),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 5),
    )
    steps = [[data.draw(st.lists(key, max_size=6)) for _ in range(size)] for _ in range(3)]
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = tf.get_variable("t", [None, D], initializer=normal())
        p = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(t, p)
        train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(rows))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in steps:
                session.run(train, {p: np.array(step[rank], np.int64)})
            every = np.array([k for step in steps for one in step for k in one], np.int64)
            distinct, times = np.unique(every, return_counts=True)
            want = drawn(distinct) - times[:, None].astype(np.float32) / size
            np.testing.assert_allclose(session.run(rows, {p: distinct}), want, rtol=1e-5, atol=1e-5)
            assert session.run(t.total_count()) == len(distinct)


@pytest.mark.slow
def test_strings_and_small_integers_are_keys(strategy):
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, key_dtype=tf.string, initializer=normal())
        words = tf.constant(["a", "bc", ""])
        train = tf.train.GradientDescentOptimizer(0.0).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(t, words))
            + tf.reduce_sum(tf.nn.embedding_lookup(t, [3, -4]))
        )
        hashed = tf.strings.to_hash_bucket_fast(words, 2**63 - 1)
        sparse = tf.sparse.from_dense([["a", "bc"]])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_array_equal(
                session.run(tf.nn.embedding_lookup(t, words)), drawn(session.run(hashed))
            )
            np.testing.assert_array_equal(
                session.run(tf.gather(t, tf.constant([3, -4], tf.int32))), drawn([3, -4])
            )
            np.testing.assert_allclose(
                session.run(tf.nn.safe_embedding_lookup_sparse(t, sparse, combiner="sum"))[0],
                drawn(session.run(hashed[:2])).sum(0),
                rtol=1e-6,
            )
    assert len({"t", *drawn([3], "t")[0].tolist()}) == D + 1


PLACES = np.array([[0, 0, 0], [0, 0, 2], [0, 1, 1], [2, 0, 0], [2, 0, 1]], np.int64)


@pytest.mark.sample(6)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("default", [None, 3])
def test_safe_lookups_are_tensorflows_for_keys_that_it_takes_for_valid(
    strategy, combiner, weighted, default
):
    """Three dimensions, samples without ids, weights that aren't positive; the last samples are
    empty, too.
    """
    ids, weights = np.array([1, 4, 2, 1, 7], np.int64), np.array([1, 0.5, -1, 2, 0], np.float32)

    def lookup(t):
        sparse = tf.SparseTensor(PLACES, ids, [4, 2, 3])
        return tf.nn.safe_embedding_lookup_sparse(
            t,
            sparse,
            tf.SparseTensor(PLACES, weights, [4, 2, 3]) if weighted else None,
            combiner,
            default,
        )

    with tf.Graph().as_default(), tf.Session() as session:
        want = session.run(lookup(tf.constant(drawn(np.arange(8)))))
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, initializer=normal())
        rows = lookup(t)
        assert rows.shape.rank == 3 and rows.shape[-1] == D
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(rows))
        total = t.total_count()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_allclose(session.run(rows), want, rtol=1e-6, atol=1e-6)
            used = ids if not weighted or combiner == "sum" else ids[weights > 0]
            assert session.run(total) == len(set(used) | ({default} - {None}))


def test_safe_lookups_keep_negative_keys_and_take_nothing_for_nothing(strategy):
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, initializer=normal())
        places, ids = tf.placeholder(tf.int64, [None, 2]), tf.placeholder(tf.int64, [None])
        sparse = tf.SparseTensor(places, ids, [3, 2])
        rows = [
            tf.nn.safe_embedding_lookup_sparse(t, sparse, combiner="sum"),
            tf2.nn.safe_embedding_lookup_sparse([t], sparse, combiner="sum"),
        ]
        train = tf.train.AdamOptimizer(0.0).minimize(tf.reduce_sum(rows[0]))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {places: np.empty((0, 2)), ids: []})
            assert session.run(t.total_count()) == 0
            for r in session.run(rows, {places: np.empty((0, 2)), ids: []}):
                np.testing.assert_array_equal(r, np.zeros((3, D)))
            feed = {places: [[1, 0], [1, 1]], ids: [-1, -5]}
            session.run(train, feed)
            for r in session.run(rows, feed):
                np.testing.assert_allclose(r, [[0] * D, drawn([-1, -5]).sum(0), [0] * D], rtol=1e-6)


def test_a_key_starts_the_same_whenever_it_comes(strategy, rank):
    """Its slot, too: two optimizers, other keys before it, in another session of the same graph."""
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, initializer=normal())
        p = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, p))
        trains = [
            tf.train.AdagradOptimizer(0.1).minimize(loss),
            tf.train.RMSPropOptimizer(0.1).minimize(loss),
        ]
        row = tf.nn.embedding_lookup(t, [42])
        found = []
        for before in ([], [[1, 2, 3], [7], [-9, 2]]):
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for keys in before:
                    session.run(trains[0], {p: keys})
                for train in trains:
                    session.run(train, {p: [42]})
                found.append(session.run(row))
        np.testing.assert_array_equal(found[0], found[1])


def test_ragged_keys(strategy):
    """As rows; TensorFlow's own way of pooling them takes negative keys for none, so they are
    pooled as sparse ones.
    """
    with strategy.scope(), tf.Graph().as_default():
        t = tf.get_variable("t", [None, 3], initializer=tf.ones_initializer())
        keys = tf.RaggedTensor.from_row_lengths(tf.constant([7, -1, 7], tf.int64), [1, 0, 2])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, keys).flat_values)
        for pooled in (tf.nn.embedding_lookup_sparse, tf.nn.safe_embedding_lookup_sparse):
            with pytest.raises(TableError, match=r"table 't'.*ids\.to_sparse\(\)"):
                pooled(t, keys, None)
        rows = tf.nn.safe_embedding_lookup_sparse(t, keys.to_sparse(), combiner="sum")
        train = tf.train.GradientDescentOptimizer(0.0).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_array_equal(session.run(rows), [[1] * 3, [0] * 3, [2] * 3])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_types_of_values(strategy, dtype):
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, value_dtype=dtype, initializer=normal())
        train, rows = touch(t, EXTREME)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_allclose(
                session.run(tf.cast(rows, tf.float32)),
                drawn(EXTREME),
                rtol={tf.float16: 1e-3, tf.bfloat16: 1e-2, tf.float64: 1e-7}[dtype],
            )
