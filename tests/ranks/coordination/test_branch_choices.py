"""Branches with a lookup: all ranks take the same ones, or all are told which one they don't."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from tests.ranks import reference

pytestmark = [
    pytest.mark.either_backend,
    pytest.mark.parametrize("flavour", ["v1", "v2"], indirect=True),
]

ROWS = reference.table_values(10, 2)


def session_of(build, strategy):
    """Yields a session with what `build(table, ids)` returns."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", 10, 2)
        ids = tf.placeholder(tf.int64, [None], "ids")
        built = build(table, ids)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            yield session, built, ids


def look_up(table, ids):
    return lambda: tf.nn.embedding_lookup(table, ids)


def zeros(ids):
    return lambda: tf.zeros([tf.size(ids), 2])


def refused(session, fetches, feeds, rank, size, name):
    """Runs what ranks decide in different ways; one rank alone has nothing to wait for."""
    if size == 1:
        session.run(fetches, feeds)
        return
    with pytest.raises(RankError, match=f"they differ at '{name}', in which they exchange"):
        session.run(fetches, feeds)


@pytest.mark.sample(2)
@pytest.mark.parametrize("trains", [False, True])
def test_a_branch_that_one_rank_takes_alone_is_refused(strategy, rank, size, flavour, trains):
    def build(table, ids):
        take = tf.placeholder(tf.bool, [], "take")
        rows = tf.cond(take, look_up(table, ids), zeros(ids), name="way")
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        loss = tf.reduce_sum(rows) * w
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        return train if trains else rows, take

    for session, (fetched, take), ids in session_of(build, strategy):
        for all_take in (True, False):
            rows = session.run(fetched, {ids: [1, 2], take: all_take})
            if not trains:
                np.testing.assert_allclose(rows, ROWS[[1, 2]] * all_take)
        refused(session, fetched, {ids: [1, 2], take: rank == 0}, rank, size, "way")


@pytest.mark.sample(1)
def test_a_branch_inside_another_matters_where_that_is_taken(strategy, rank, size, flavour):
    def build(table, ids):
        outer, inner = (tf.placeholder(tf.bool, [], name) for name in ("a", "b"))

        def look_up_inside():
            return tf.cond(inner, look_up(table, ids), zeros(ids), name="inner")

        return tf.cond(outer, look_up_inside, zeros(ids), name="outer"), outer, inner

    for session, (rows, outer, inner), ids in session_of(build, strategy):
        both = session.run(rows, {ids: [3], outer: True, inner: True})
        np.testing.assert_allclose(both, ROWS[[3]])
        # Whatever ranks would take inside, none comes there.
        neither = session.run(rows, {ids: [3], outer: False, inner: rank == 0})
        np.testing.assert_allclose(neither, [[0, 0]])
        feeds = {ids: [3], outer: True, inner: rank == 0}
        refused(session, rows, feeds, rank, size, "(outer/)?inner")


@pytest.mark.sample(1)
def test_branches_without_a_lookup_are_each_ranks_own(strategy, rank, size, flavour):
    def build(table, ids):
        way = tf.placeholder(tf.int32, [], "way")
        scale = tf.switch_case(way, [lambda: 2.0, lambda: 3.0, lambda: 4.0])
        first_or_third = [zeros(ids), look_up(table, ids), zeros(ids)]
        chosen = tf.switch_case(way, first_or_third, name="ways")
        return scale * tf.nn.embedding_lookup(table, ids), chosen, way

    for session, (scaled, chosen, way), ids in session_of(build, strategy):
        got = session.run(scaled, {ids: [rank % 10], way: rank % 3})
        np.testing.assert_allclose(got, ROWS[[rank % 10]] * (2 + rank % 3), rtol=1e-6)
        np.testing.assert_allclose(session.run(chosen, {ids: [1], way: 1}), ROWS[[1]])
        np.testing.assert_allclose(session.run(chosen, {ids: [1], way: 2 * (rank % 2)}), [[0, 0]])


@pytest.mark.sample(1)
def test_what_decides_may_depend_on_rows(strategy, rank, size, flavour):
    """It is known only after the first lookup, and so isn't compared."""

    def build(table, ids):
        take = tf.nn.embedding_lookup(table, ids)[0, 0] > 0
        return tf.cond(take, look_up(table, ids), zeros(ids), name="way")

    for session, rows, ids in session_of(build, strategy):
        for row in int(ROWS[:, 0].argmax()), int(ROWS[:, 0].argmin()):
            taken = session.run(rows, {ids: [row]})
            np.testing.assert_allclose(taken, ROWS[[row]] * (ROWS[row, 0] > 0))
