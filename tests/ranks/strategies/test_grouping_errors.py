"""An error in one lookup of a group is every rank's, in the same words, before anything moves."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from collective.ops import kernel_device
from tests.ranks import reference
from tests.ranks.grouped import everyone, rows_of, same

pytestmark = [pytest.mark.backends("hb"), pytest.mark.double]

# What is fed, the id that is wrong, and the table that the error names.
INVALID = [
    ("dense", 10, "a", 10),
    ("dense", -1, "a", 10),
    ("dense", 2**40, "a", 10),
    ("pooled", 6, "b", 6),
    ("pooled", -(2**62), "b", 6),
    ("weighted", 9, "b", 6),
    ("attended", 4, "c", 4),
    ("chosen", 5, "d", 5),
]


def model(embedding_scope):
    """Builds lookups of all kinds, on two levels; returns (train, state, placeholders)."""
    with embedding_scope():
        t = {
            name: reference.table(name, rows, 2, seed)
            for seed, (name, rows) in enumerate((("a", 10), ("b", 6), ("c", 4), ("d", 5)))
        }
        scores = tf.get_variable(
            "scores", [9, 1], initializer=tf.constant_initializer(np.arange(9.0)[:, None])
        )
        keys = tf.get_variable("keys", [None, 2], initializer=tf.ones_initializer())
    p = {
        name: tf.placeholder(tf.int64, [None])
        for name in ("dense", "pooled", "weighted", "attended", "chosen")
    }

    def pairs(values):
        places = tf.range(tf.size(values, out_type=tf.int64))
        return tf.SparseTensor(tf.stack([places // 2, places % 2], 1), values, [2, 2])

    floats = tf.nn.embedding_lookup(scores, p["chosen"])[:, 0]
    rows = [
        tf.nn.embedding_lookup(t["a"], p["dense"]),
        tf.nn.embedding_lookup_sparse(t["b"], pairs(p["pooled"]), None),
        tf.nn.embedding_lookup_sparse(
            t["b"], pairs(p["weighted"]), pairs(tf.cast(p["weighted"], tf.float32))
        ),
        tf.nn.embedding_lookup_sparse(t["c"], pairs(p["attended"]), pairs(floats), combiner="sum"),
        tf.nn.embedding_lookup(t["d"], tf.cast(floats, tf.int64)),
        tf.nn.embedding_lookup(keys, p["dense"]),
    ]
    train = tf.train.AdagradOptimizer(0.1).minimize(
        sum(tf.reduce_mean(tf.square(row)) for row in rows)
    )
    return train, rows_of(t), p


@pytest.mark.parametrize("grouping", [True, False])
def test_an_invalid_id_of_any_member_is_everyones_error_and_nothing_is_applied(
    strategy, rank, size, grouping
):
    """On the last rank, or on all; the session goes on."""
    with strategy.scope(grouping=grouping), tf.Graph().as_default():
        train, state, p = model(strategy.embedding_scope)
        good = {ids: [1, 3, 3] for ids in p.values()}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, good)
            for case, (name, bad, table, rows) in enumerate(INVALID):
                before = session.run(state)
                first = 0 if case % 2 else size - 1
                mine = [1, bad, 3] if rank >= first else [1, 3, 3]
                with pytest.raises(tf.errors.InvalidArgumentError) as raised:
                    session.run(train, {**good, p[name]: mine})
                where = "" if size == 1 else f" (on rank {first})"
                assert f"table '{table}': id {bad} is not in [0, {rows}){where}" in str(
                    raised.value
                )
                same(session.run(state), before, rtol=0, atol=0)
            session.run(train, good)


@pytest.mark.sample(1)
@pytest.mark.parametrize("grouping", [True, False])
def test_ids_indices_and_weights_that_do_not_belong_together(strategy, rank, size, grouping):
    """On one rank: the same error on all, before anything moves, and the session goes on."""
    on_device = kernel_device.chosen() != "cpu"
    with strategy.scope(grouping=grouping), tf.Graph().as_default():
        with strategy.embedding_scope():
            t, u = (
                reference.table("t", 9, 2),
                tf.get_variable("u", [None, 2], initializer=tf.ones_initializer()),
            )
        places, ids = tf.placeholder(tf.int64, [None, 2]), tf.placeholder(tf.int64, [None])
        weights = tf.placeholder(tf.float32, [None])
        sparse, weighing = (tf.SparseTensor(places, values, [3, 3]) for values in (ids, weights))
        rows = [
            tf.nn.embedding_lookup_sparse(table, sparse, weighing, combiner="sum")
            for table in (t, u)
        ]
        rows.append(tf.nn.embedding_lookup(t, [0, 1]))
        train = tf.train.AdagradOptimizer(0.1).minimize(
            sum(tf.reduce_mean(tf.square(row)) for row in rows)
        )
        good = {places: [[0, 0], [1, 0], [1, 1]], ids: [1, 2, 3], weights: [1.0, 0.5, 2.0]}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for wrong, words in (
                ({weights: [1.0, 0.5]}, "the number of sp_weights less that of sp_ids is -1"),
                ({ids: [1, 2]}, "the number of sp_ids' indices less that of its values is .1"),
                (
                    {places: [[1, 0], [0, 0], [1, 1]]},
                    r"sp_ids has a sample below the one before it, or below 0 \(places: 1\)",
                ),
            ):
                before = session.run(rows_of({"t": t}))
                with pytest.raises(
                    tf.errors.InvalidArgumentError,
                    # On a CPU a single rank leaves it to TensorFlow to find this.
                    match=f"table '[tu]': {words}" if size > 1 or on_device else "",
                ):
                    session.run(train, {**good, **(wrong if rank == size - 1 else {})})
                same(session.run(rows_of({"t": t})), before, rtol=0, atol=0)
                session.run(train, good)


@pytest.mark.parametrize("grouping", [True, False])
def test_lookups_that_cannot_be_are_refused_where_they_are_written(strategy, grouping):
    with strategy.scope(grouping=grouping), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", 9, 2)
        fine = tf.nn.embedding_lookup(t, [1])
        with pytest.raises(TypeError, match="table 't': ids must be integers, not float32"):
            tf.nn.embedding_lookup(t, tf.constant([1.0]))
        ids = tf.SparseTensor([[0, 0], [0, 1]], tf.constant([1, 2], tf.int64), [1, 2])
        with pytest.raises(TypeError):
            tf.nn.embedding_lookup_sparse(
                t, tf.SparseTensor(ids.indices, tf.constant([1.0, 2.0]), ids.dense_shape), None
            )
        with pytest.raises(ValueError):
            tf.nn.embedding_lookup_sparse(t, ids, tf.SparseTensor([[0, 0]], [1.0], [1, 2]))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(fine))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)


# ---- Ranks that built different graphs


def differing(strategy, rank, difference):
    """Builds a graph that differs on rank 0: (train, rows of the table that is the same)."""
    odd = difference if rank == 0 else None
    with strategy.embedding_scope():
        a = reference.table("a", 9, 3)
        b = tf.get_variable(
            "b", [9, 4 if odd == "dimension" else 3], initializer=tf.ones_initializer()
        )
        c = tf.get_variable("c", [12 if odd == "size" else 9, 3], initializer=tf.ones_initializer())
    ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], tf.constant([1, 8, 3], tf.int64), [2, 2])
    rows = [tf.nn.embedding_lookup(a, [1, 8])]
    late = [
        lambda: tf.nn.embedding_lookup(b, [1, 8]),
        lambda: tf.nn.embedding_lookup_sparse(
            c, ids, None, combiner="sum" if odd == "combiner" else "mean"
        ),
    ]
    rows += [make() for make in (late[::-1] if odd == "order" else late)]
    if odd == "another lookup":
        rows.append(tf.nn.embedding_lookup(b, [2]))
    loss = sum(tf.reduce_mean(tf.square(row)) for row in rows)
    return tf.train.GradientDescentOptimizer(0.1).minimize(loss), tf.nn.embedding_lookup(
        a, tf.range(9)
    )


DIFFERENT = ["dimension", "size", "combiner", "another lookup"]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "grouping, difference",
    [
        *((True, kind) for kind in [*DIFFERENT, "order", "wire", "grouping"]),
        *((False, kind) for kind in DIFFERENT),
    ],
)
def test_ranks_with_different_graphs_are_told_the_first_difference(
    strategy, rank, size, grouping, difference
):
    """On every rank, before anything is updated. (A lookup's place in its group is part of what it
    is.)
    """
    if size == 1:
        return
    options = (
        {"wire": {"wire_dtype": tf.float16}, "grouping": {"grouping": False}} if rank == 0 else {}
    )
    with (
        strategy.scope(**{"grouping": grouping, **options.get(difference, {})}),
        tf.Graph().as_default(),
    ):
        train, _ = differing(strategy, rank, difference)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(RankError, match="First difference") as raised:
                session.run(train)
    told = str(raised.value).partition("First difference: ")[2]
    assert len(set(everyone(told))) == 1
    named = {
        "dimension": "b",
        "size": "c",
        "combiner": "c",
        "order": "b",
        "another lookup": "b",
    }.get(difference)
    if named is not None:
        assert (f"table '{named}'" if grouping else f"collective.{named}.keys") in told.partition(
            " is used by"
        )[0], told
    assert ("in a different order: first comes" in told) == (grouping and difference == "order"), (
        told
    )


@pytest.mark.grouped
def test_ranks_that_need_different_members_are_told(strategy, rank, size):
    """The same graph, the same exchange: but one rank needs a lookup that its peers don't."""
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        train, rows = differing(strategy, 1, None)
        other = tf.nn.embedding_lookup([v for v in tf.global_variables() if v.op.name == "b"], [2])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([rows, other])
            with pytest.raises(RankError, match="First difference: .*table 'b'"):
                session.run([rows, other] if rank == 0 else [rows])


@pytest.mark.parametrize("monitored", [False, True])
def test_the_end_of_one_ranks_data_ends_a_grouped_step_on_all(strategy, rank, size, monitored):
    have = 2 + rank % 2
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = [reference.table(name, 9, 3) for name in "ab"]
        ids = tf.data.make_one_shot_iterator(
            tf.data.Dataset.from_tensors([1, rank]).repeat(have)
        ).get_next()
        loss = sum(tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, ids))) for table in t)
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        init, steps = tf.global_variables_initializer(), 0
        with tf.train.MonitoredTrainingSession("") if monitored else tf.Session() as session:
            if not monitored:
                session.run(init)
            with (
                contextlib.nullcontext() if monitored else pytest.raises(tf.errors.OutOfRangeError)
            ):
                while not (monitored and session.should_stop()):
                    session.run(train)
                    steps += 1
    assert steps == 2
