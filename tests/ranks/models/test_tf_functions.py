"""Lookups work in `tf.function`s that are traced once and called as often as a script likes."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.errors import RankError
from tests.ranks import reference

pytestmark = pytest.mark.double

IDS = np.array([4, 0, 4, 8, 3, 7, 7, 1, 0, 5, 8, 2])


def squares(t):
    return tf.function(lambda ids: tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids))))


def twice_in_one_function(t):
    once = squares(t)
    both = tf.function(lambda ids: once(ids) + 3 * once((ids + 2) % 9))
    return lambda ids: both(ids) + 2 * both((ids + 1) % 9) + once((ids + 3) % 9)


def in_a_branch(t):
    once = squares(t)

    def branch(ids):
        return tf.cond(
            tf.size(ids) > 0, lambda: 2 * once((ids + 1) % 9) + once(ids), lambda: tf.constant(0.0)
        )

    return lambda ids: tf.function(branch)(ids) + branch((ids + 2) % 9)


def in_one_of_several_branches(t):
    once = squares(t)
    chosen = tf.function(
        lambda ids: tf2.switch_case(
            tf.size(ids) % 1 + 1,
            [lambda: tf.constant(0.0), lambda: once(ids) + once((ids + 3) % 9), lambda: once(ids)],
        )
    )
    return lambda ids: chosen(ids) + 2 * chosen((ids + 1) % 9)


def in_a_loop(t):
    once = squares(t)
    loop = tf.function(
        lambda ids: tf.while_loop(
            lambda i, _: i < 2,
            lambda i, x: (i + 1, x + once((ids + i) % 9)),
            [tf.constant(0, tf.int64), tf.constant(0.0)],
        )[1]
    )
    return lambda ids: loop(ids) + 2 * loop((ids + 4) % 9)


def several(t):
    once = squares(t)
    return lambda ids: once(ids) + 2 * once((ids + 1) % 9) + 4 * once((ids + 5) % 9)


def in_a_loop_of_version_1(t):
    once = squares(t)

    def loop(ids):
        tf.disable_control_flow_v2()
        try:
            return tf.while_loop(
                lambda i, _: i < 5,
                lambda i, x: (i + 1, x + once((ids + i) % 9)),
                [tf.constant(0, tf.int64), tf.constant(0.0)],
            )[1]
        finally:
            tf.enable_control_flow_v2()

    return loop


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "called",
    [
        several,
        twice_in_one_function,
        in_a_branch,
        in_one_of_several_branches,
        in_a_loop,
        in_a_loop_of_version_1,
    ],
)
def test_functions_that_are_called_several_times(strategy, rank, size, called):
    """At the same time, for all that TensorFlow knows: each call meets its peers' same call."""

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 9, 3)
        ids = tf.placeholder(tf.int64, [None])
        loss = called(t)(ids)
        train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
        return {"train": train, "loss": loss, "rows": tf.nn.embedding_lookup(t, tf.range(9))}, {
            "ids": ids
        }

    steps = [(["train"], IDS), (["train", "loss"], IDS[::-1].copy())]
    want = reference.plain(
        build, [*((fetches, {"ids": ids}) for fetches, ids in steps), (["rows"], {})]
    )
    got = reference.sharded(
        strategy,
        build,
        [
            *((fetches, {"ids": reference.part(ids, rank, size)}) for fetches, ids in steps),
            (["rows"], {}),
        ],
    )
    np.testing.assert_allclose(got[2]["rows"], want[2]["rows"], rtol=2e-5, atol=1e-6)


def test_a_function_that_is_called_again_after_a_run(strategy):
    with strategy.scope(), tf.Graph().as_default(), tf.Session() as session:
        with strategy.embedding_scope():
            t = tf.get_variable("t", [9, 2], initializer=tf.ones_initializer())
        once = squares(t)
        one = once(tf.constant([1, 2]))
        session.run(tf.global_variables_initializer())
        assert session.run(one) == 1
        two = once(tf.constant([3]))
        # and by its gradient
        train = tf.train.GradientDescentOptimizer(0.5).minimize(once(tf.constant([3])))
        assert session.run([one, two]) == [1, 1]
        session.run(train)
        assert session.run([one, two]) == [1, 0.25]


def test_ranks_that_call_a_function_elsewhere_are_told(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [9, 2], initializer=tf.ones_initializer())
        once = squares(t)
        one, two = once(tf.constant([1, 2])), once(tf.constant([3]))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if size == 1:
                assert session.run([one, two]) == [1, 1]
            else:
                with pytest.raises(RankError, match=f"call of {one.op.name}"):
                    session.run(one if rank == 0 else two)
