"""Warnings name the assignments that leave variables different on each rank; nobody waits."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import reference
from tests.ranks.assignments import BATCHES, D, V, warnings

pytestmark = [pytest.mark.either_backend, pytest.mark.double]


def test_what_has_no_mean_is_said(strategy, rank, size):
    """Integers, some elements only, what grows, what belongs to samples, what comes of such: each
    rank's own, as a rank's local variables are, of which nothing is said.
    """
    with strategy.scope(), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        seen = tf.get_variable(
            "seen", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        last = tf.get_variable("last", [2], initializer=tf.zeros_initializer(), trainable=False)
        own = tf.get_variable(
            "own",
            [],
            initializer=tf.zeros_initializer(),
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
        )
        steps = tf.get_variable(
            "steps", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        grown = tf.Variable(
            [1.0], validate_shape=False, trainable=False, name="grown", shape=[None]
        )
        state = tf.get_variable(
            "state", [2, 1], initializer=tf.zeros_initializer(), trainable=False
        )
        of_own = tf.get_variable("of_own", [], initializer=tf.zeros_initializer(), trainable=False)
        step = [
            tf.assign_add(seen, tf.size(x, out_type=tf.int64)),
            tf.scatter_update(last, [1], x[:1]),
            tf.assign_add(own, x[0]),
            tf.assign_add(steps, 1),
            tf.assign(grown, tf.reduce_sum(x)[None]),
            tf.assign(state, tf.tanh(state + x[0])),
            tf.assign(of_own, 2 * own),
        ]
        with strategy.embedding_scope():
            reference.table("t", V, D)
        with warnings() as said, tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(2):
                session.run(step, {x: [rank + 1.0] * (rank + 1)})
            assert session.run([seen, own, steps]) == [2 * (rank + 1), 2 * (rank + 1), 2]
    names = ("seen", "last", "grown", "state", "of_own")
    for name in names[:-1]:
        about = [text for text in said if f"'{name}'" in text]
        assert len(about) == (size > 1 and rank == 0), said
        assert all("drift" in text and "LOCAL_VARIABLES" in text for text in about)
    assert len(said) == len(names) * (size > 1 and rank == 0)


@pytest.mark.parametrize("kind", ["rate", "count", "update"])
def test_what_a_rank_alone_decides_is_said(strategy, rank, size, kind):
    """A rate that one rank halves, by numbers that all have; an update that it leaves out."""
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        x = tf.placeholder(tf.float32, [None])
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        count = tf.get_variable(
            "count", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        loss = tf.reduce_mean(x) * w
        pairs = tf.train.GradientDescentOptimizer(0.1).compute_gradients(loss, [w])

        def change():
            if kind == "update":
                return tf.train.GradientDescentOptimizer(0.1).apply_gradients(pairs)
            return tf.group(tf.assign(w, w * 0.5) if kind == "rate" else tf.assign_add(count, 1))

        done = tf.cond(loss < 2.5, change, tf.no_op)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(done, {x: [2.0 + rank]})
    about = [
        text
        for text in said
        if "drift" in text and ("'count'" if kind == "count" else "'w'") in text
    ]
    assert len(about) == len(said) == (size > 1 and rank == 0), said


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["branch", "case", "loop"])
def test_where_ranks_do_not_all_come_by_nobody_waits(strategy, rank, size, kind, flavour):
    """The best loss of a rank's own so far: taken on one rank, not on another."""
    with strategy.scope(), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        best = tf.get_variable(
            "best",
            [],
            initializer=tf.constant_initializer(9.0),
            trainable=False,
            # a function takes no reference
            use_resource=True if kind == "case" else None,
        )
        loss = tf.reduce_mean(x)

        def better():
            with tf.control_dependencies([tf.assign(best, loss)]):
                return tf.identity(loss)

        with warnings() as said:
            if kind == "branch":
                now = tf.cond(loss < best, better, lambda: tf.identity(best))
            elif kind == "case":
                now = tf.switch_case(
                    tf.cast(loss < best, tf.int32), [lambda: tf.identity(best), better]
                )
            else:
                now = tf.while_loop(
                    lambda i, _: tf.cast(i, tf.float32) < loss,
                    lambda i, _: (i + 1, better()),
                    [0, loss],
                )[1]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(now, {x: [8.0 + 2 * rank]})
            assert session.run(best) == (9.0 if rank and kind != "loop" else 8.0 + 2 * rank)
    about = [text for text in said if "'best'" in text and "drift" in text]
    assert len(about) == len(said) == (size > 1 and rank == 0)


def test_a_queue_is_filled_by_a_thread_of_its_own(strategy, rank, size):
    """Which takes part in no mean, while training waits for what it enqueues."""
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        mean = tf.get_variable("mean", [], initializer=tf.zeros_initializer(), trainable=False)
        ids = tf.random.uniform([4], maxval=V, dtype=tf.int64)
        with tf.control_dependencies(
            [tf.assign(mean, 0.9 * mean + 0.1 * tf.reduce_mean(tf.cast(ids, tf.float32)))]
        ):
            ids = tf.identity(ids)
        queue = tf.queue.FIFOQueue(2, [tf.int64], [[4]])
        tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(ids)]))
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, queue.dequeue())))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
        with tf.train.MonitoredTrainingSession(
            "", hooks=[tf.train.StopAtStepHook(last_step=5)]
        ) as session:
            while not session.should_stop():
                session.run(train)
    assert len([text for text in said if "'mean'" in text and "drift" in text]) == (
        size > 1 and rank == 0
    )


def test_an_update_at_a_rate_of_the_ranks_own_is_said(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        w, x = (
            tf.get_variable("w", [D], initializer=tf.ones_initializer()),
            tf.placeholder(tf.float32, [None, D]),
        )
        loss = tf.reduce_mean(x * w)
        train = tf.train.GradientDescentOptimizer(0.1 * loss).minimize(loss)
        with warnings() as said, tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: np.full([2, D], rank + 1)})
    assert (
        len([text for text in said if "'w'" in text and "drift" in text])
        == len(said)
        == (size > 1 and rank == 0)
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["count", "unlisted"])
def test_branches_that_ranks_come_to_by_their_own_counts(strategy, rank, size, kind, flavour):
    """One has seen enough, another hasn't: nobody waits."""
    if kind == "unlisted" and flavour == "references":
        return
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            reference.table("t", V, D)
        x = tf.placeholder(tf.float32, [None, D])
        mean = tf.get_variable("mean", [D], initializer=tf.zeros_initializer(), trainable=False)
        collections = [tf.GraphKeys.GLOBAL_VARIABLES] if kind == "count" else []
        seen = tf.get_variable(
            "seen",
            [],
            tf.int64,
            initializer=tf.zeros_initializer(),
            trainable=False,
            collections=collections,
        )
        now = tf.assign_add(seen, tf.shape(x, out_type=tf.int64)[0])
        update = tf.cond(
            now >= 10,
            lambda: tf.group(tf.assign(mean, 0.5 * mean + tf.reduce_mean(x, 0))),
            tf.no_op,
        )
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), seen.initializer])
            session.run(update, {x: np.ones([9 if rank else 11, D])})
            np.testing.assert_array_equal(session.run(mean), np.zeros(D) if rank else np.ones(D))
    assert len([text for text in said if "'mean'" in text and "drift" in text]) == (
        size > 1 and rank == 0
    ), said


def test_functions_take_no_mean(strategy, rank, size):
    """Which may be called twice in a run."""
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            reference.table("t", V, D)
        x, mean = (
            tf.placeholder(tf.float32, [None, D]),
            tf.get_variable("mean", [D], use_resource=True, trainable=False),
        )
        move = tf.function(lambda y: mean.assign_add(tf.reduce_mean(y, 0)))
        both = [move(x), move(2.0 * x)]
        with tf.Session() as session:
            session.run(mean.initializer)
            session.run(both, {x: BATCHES[0]["x"]})
    assert len([text for text in said if "'mean'" in text and "drift" in text]) == (
        size > 1 and rank == 0
    ), said


def test_a_count_in_front_of_batch_normalization_is_said_not_refused(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        x = tf.placeholder(tf.float32, [None, D])
        seen = tf.get_variable(
            "seen", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        with tf.control_dependencies([tf.assign_add(seen, tf.size(x, out_type=tf.int64))]):
            out = tf.layers.batch_normalization(
                tf.identity(x), training=True
            ) + tf.nn.embedding_lookup(t, [1])
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(out))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: BATCHES[0]["x"]})
    assert len([text for text in said if "'seen'" in text]) == len(said) == (size > 1 and rank == 0)


def test_a_table_that_is_assigned_what_a_rank_alone_knows_is_warned_of(strategy, rank, size):
    """Rows by their owners' data; what all ranks have, a value that is fed, or a mean needs no
    word.
    """
    with strategy.scope(plan="quiet"), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            codebook = reference.table("codebook", V, D)
        x = tf.placeholder(tf.float32, [None, D])
        fine = [
            codebook.assign(codebook * 0.5),
            tf.assign_add(codebook, np.ones([V, D])),
            codebook.assign_sub(tf.ones([V, D])),
            codebook.assign(tf.placeholder(tf.float32, [V, D])),
            codebook.assign_add(tf.zeros([V, D]) + tf.norm(codebook)),
        ]
        assert not said and len(fine) == 5
        codebook.assign(0.9 * codebook + 0.1 * tf.reduce_mean(x, 0))
    assert len(said) == (size > 1 and rank == 0)
    assert (
        not said
        or said[0].startswith("The table 'codebook' is assigned what depends on")
        and "allreduce" in said[0]
    )
