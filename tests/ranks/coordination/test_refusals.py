"""A run that is refused after its first exchanges is every rank's, and all go on from there."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import reference

THREADS = tf.ConfigProto(inter_op_parallelism_threads=4, use_per_session_threads=True)
ROWS = 8


def late(x, seconds):
    """Returns `x`, when `seconds` are over."""
    slow = tf.numpy_function(lambda: time.sleep(seconds), [], [])
    with tf.control_dependencies([slow]):
        return tf.identity(x)


def chosen_by_rows(table, which, ids):
    """Looks rows of `table` up whose ids are the rows of another table."""
    return tf.nn.embedding_lookup(
        table, tf.cast(tf.nn.embedding_lookup(which, ids)[:, 0], tf.int64)
    )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("depends", [False, True])
def test_an_idle_rank_learns_of_an_id_that_is_invalid_on_a_peer(
    strategy, rank, size, depends, first
):
    """In an evaluation that it answers, where the id comes from another lookup, or not; it may be
    in the first batch that anybody evaluates. Then all go on to something else.
    """
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            which = tf.get_variable(
                "which", [4, 1], initializer=tf.constant_initializer([[1.0], [2], [3], [9]])
            )
            table = reference.table("t", ROWS, 2)
        batches = [[1, 3 if depends else 9]] if rank == 0 else []
        if not first:
            batches = [[0, 1], [1, 2], *batches] if rank == 0 else [[0, 1]]
        iterator = tf.data.make_initializable_iterator(
            tf.data.Dataset.from_tensor_slices(np.reshape(batches, [-1, 2]).astype(np.int64))
        )
        ids = iterator.get_next()
        rows = chosen_by_rows(table, which, ids) if depends else tf.nn.embedding_lookup(table, ids)
        everything = tf.nn.embedding_lookup(table, tf.range(ROWS))
        with tf.Session(config=THREADS) as session:
            session.run(tf.global_variables_initializer())
            session.run(iterator.initializer)
            for _ in range(len(batches) - (rank == 0)):
                session.run(rows)
            with pytest.raises(tf.errors.InvalidArgumentError, match="id 9 is not in"):
                session.run(rows)
            np.testing.assert_allclose(
                session.run(everything), reference.table_values(ROWS, 2), rtol=1e-6
            )


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["function", "cond", "while"])
def test_exchanges_in_calls_are_made_by_all_ranks_though_the_run_is_refused(
    strategy, rank, size, kind
):
    """One rank comes to the call later than all to the refusal, whereupon TensorFlow would not
    begin the call of a function any more.
    """
    values = reference.table_values(ROWS, 2)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            which = tf.get_variable(
                "which", [4, 1], initializer=tf.constant_initializer([[1.0], [2], [3], [9]])
            )
            table = reference.table("t", ROWS, 2)
        ids = tf.placeholder(tf.int64, [2])
        rows = chosen_by_rows(table, which, ids)
        with tf.control_dependencies([tf.nn.embedding_lookup(which, ids)]):  # after the gate
            late_ids = late(ids, 0 if rank else 0.2)

        def look_up():
            return tf.nn.embedding_lookup(table, late_ids)

        if kind == "function":
            called = tf.function(look_up, experimental_attributes={"_noinline": True})()
        elif kind == "cond":
            called = tf.cond(late_ids[0] >= 0, look_up, lambda: tf.zeros([2, 2]))
        else:
            called = tf.while_loop(
                lambda i, _: i < 2, lambda i, x: (i + 1, x + look_up() / 2), (0, tf.zeros([2, 2]))
            )[1]
        with tf.Session(config=THREADS) as session:
            session.run(tf.global_variables_initializer())
            for batch in ([0, 1], [0, 3], [2, 1]):
                if 3 in batch:
                    with pytest.raises(tf.errors.InvalidArgumentError, match="id 9 is not in"):
                        session.run([rows, called], {ids: batch})
                    continue
                got, called_rows = session.run([rows, called], {ids: batch})
                np.testing.assert_allclose(got, values[np.array(batch) + 1])
                np.testing.assert_allclose(called_rows, values[batch])
