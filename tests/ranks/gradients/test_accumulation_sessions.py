"""scope(local_steps=k) counts updates, and survives a session's events in the middle of k."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint
from tests.ranks.accumulation import K, build_small

pytestmark = [pytest.mark.either_backend, pytest.mark.double]


def moved(values):
    """Returns by how much all values moved, which is the same everywhere."""
    everything = np.concatenate([np.ravel(value) for value in values])
    np.testing.assert_allclose(everything, everything[0], rtol=1e-6)
    return -everything[0]


def test_max_steps_and_hooks_count_updates(strategy, folder):
    with strategy.scope(local_steps=K), tf.Graph().as_default():
        _, train, fetch = build_small(strategy)
        runs = 0
        hooks = [tf.train.StopAtStepHook(last_step=2)]
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder,
            hooks=hooks,
            save_checkpoint_secs=None,
            save_checkpoint_steps=1,
            save_summaries_steps=None,
            log_step_count_steps=None,
        ) as session:
            while not session.should_stop():
                session.run(train)
                runs += 1
    assert runs == 2 * K
    assert [tf.train.load_variable(f"{folder}/model.ckpt-{step}", "w") for step in range(3)] == [
        0.0,
        -1.0,
        -2.0,
    ]


@pytest.mark.slow
def test_batches_that_fill_no_update_are_dropped_at_the_end_of_the_data(strategy, folder):
    """The last checkpoint is of the last update, and a session that goes on from it starts a new
    mean.
    """

    def train_on(values):
        with strategy.scope(local_steps=K), tf.Graph().as_default():
            x = tf.data.make_one_shot_iterator(
                tf.data.Dataset.from_tensor_slices(np.float32(values))
            ).get_next()
            with strategy.embedding_scope():
                t = tf.get_variable("t", [4, 2], initializer=tf.zeros_initializer())
            loss = tf.reduce_sum(tf.nn.embedding_lookup(t, [1, 2])) * x
            train = tf.train.GradientDescentOptimizer(1.0).minimize(
                loss, tf.train.get_or_create_global_step()
            )
            with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
                while not session.should_stop():
                    session.run(train)

    def saved(row):
        table = checkpoint.read_table(tf.train.latest_checkpoint(folder), "t")
        return np.concatenate([rows for _, rows in table])[row]

    train_on([1.0] * K + [2.0] * K + [100.0] * (K - 1))
    assert tf.train.latest_checkpoint(folder).endswith("-2")
    np.testing.assert_allclose(saved(1), -3.0, rtol=1e-6)
    train_on([5.0] * K)
    np.testing.assert_allclose(saved(2), -8.0, rtol=1e-6)


def test_saving_in_the_middle_changes_nothing_and_restoring_starts_again(strategy, folder):
    with strategy.scope(local_steps=K), tf.Graph().as_default():
        x, train, fetch = build_small(strategy)
        saver = tf.train.Saver()

        def run(session, *values):
            for value in values:
                session.run(train, {x: value})
            return moved(session.run(fetch))

        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert run(session, *[1.0] * K) == 1.0
            assert run(session, *[8.0] * (K - 1)) == 1.0
            path = saver.save(session, f"{folder}/model.ckpt")
            assert run(session, 2.0) == pytest.approx(1.0 + (8.0 * (K - 1) + 2.0) / K)
            run(session, 100.0)
            saver.restore(session, path)
            assert run(session, *[4.0] * (K - 1)) == 1.0
            assert run(session, 4.0) == pytest.approx(5.0)
        with tf.Session() as session:  # without any initializer
            saver.restore(session, path)
            assert run(session, *[2.0] * (K - 1)) == 1.0
            assert run(session, 2.0) == pytest.approx(3.0)
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not [name for name in names if "local_steps" in name or "alike" in name]


def test_initializing_again_starts_again(strategy):
    with strategy.scope(local_steps=K), tf.Graph().as_default():
        x, train, fetch = build_small(strategy)
        with tf.Session() as session:
            for _ in range(2):
                session.run(tf.global_variables_initializer())
                for value in [2.0] * K + [50.0]:
                    session.run(train, {x: value})
                assert moved(session.run(fetch)) == 2.0


@pytest.mark.matrix
def test_data_that_starts_again_goes_on_with_the_sum(strategy):
    with strategy.scope(local_steps=2), tf.Graph().as_default():
        data = tf.data.make_initializable_iterator(
            tf.data.Dataset.from_tensor_slices(np.float32([1.0, 3.0, 8.0]))
        )
        x = data.get_next()
        with strategy.embedding_scope():
            t = tf.get_variable("t", [4, 2], initializer=tf.zeros_initializer())
        train = tf.train.GradientDescentOptimizer(1.0).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(t, [1, 2])) * x
        )
        rows = tf.nn.embedding_lookup(t, [1, 2])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for want in (2.0, 2.0 + 4.5 + 5.5):  # 1, 3 | 8 and again 1, 3, 8
                session.run(data.initializer)
                with pytest.raises(tf.errors.OutOfRangeError):
                    while True:
                        session.run(train)
                np.testing.assert_allclose(session.run(rows), -want, rtol=1e-6)


def test_a_run_that_is_refused_is_no_batch(strategy):
    """An id outside of the table, in the run that would update."""
    with strategy.scope(local_steps=2), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [4, 2], initializer=tf.zeros_initializer())
        ids = tf.placeholder(tf.int64, [None])
        w = tf.get_variable("w", initializer=tf.zeros([]))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(t, ids)) + w
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {ids: [1]})
            with pytest.raises(
                (ValueError, tf.errors.InvalidArgumentError), match="id 7 is not in"
            ):
                session.run(train, {ids: [7]})
            np.testing.assert_array_equal(session.run(w), 0.0)
            session.run(train, {ids: [2]})
            np.testing.assert_allclose(session.run([w, tf.nn.embedding_lookup(t, [1])])[0], -1.0)


def test_ranks_with_different_numbers_of_batches(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(local_steps=2 + rank), tf.Graph().as_default():
        _, train, _ = build_small(strategy)
        with tf.Session() as session, pytest.raises(RankError, match="local_steps_"):
            session.run(tf.global_variables_initializer())
            session.run(train)
