"""With scope(prefetch_keys=True), errors and the ends of data meet the runs that they belong to."""

import contextlib
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from collective.prefetch.enable import split_of
from collective.prefetch.graph_split import Start
from tests.ranks import reference
from tests.ranks.prefetched_models import B, V, batches, dataset, expects, model

pytestmark = pytest.mark.grouped  # only keys of groups are exchanged ahead


def test_a_batch_that_one_rank_alone_is_fed(strategy, rank, size):
    """At the first step, where no rank has keys: an error on all, no hang."""
    if size == 1:
        return  # there are no others
    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        batch = tf.data.make_one_shot_iterator(dataset(rank, 5)).get_next()
        fetches = model(strategy, batch)
        other = next(batches(rank, 1))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(RankError, match="do not run the same"):
                session.run(
                    fetches["train"],
                    {batch[name]: other[name] for name in other} if rank == 0 else None,
                )


@pytest.mark.matrix
def test_data_that_end_after_a_run_that_was_refused(strategy, rank, size):
    """By a lookup that isn't in the exchange; then the end is the end."""
    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        batch = tf.data.make_one_shot_iterator(dataset(rank, 2 + (rank == 0))).get_next()
        fetches = model(strategy, batch)
        which = tf.placeholder_with_default(tf.constant([0], tf.int64), [1])
        with strategy.embedding_scope(), tf.control_dependencies([tf.no_op()]):
            alone = tf.nn.embedding_lookup(reference.table("alone", 3, 2), which)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([fetches["train"], alone])
            with pytest.raises(tf.errors.InvalidArgumentError, match="table 'alone': id 7"):
                session.run([fetches["train"], alone], {which: [7]})
            for _ in range(2):
                with pytest.raises(tf.errors.OutOfRangeError):
                    for _ in range(2):
                        session.run([fetches["train"], alone])


@pytest.mark.matrix
def test_an_iterator_that_starts_again_on_one_rank_only(strategy, rank, size):
    """Its rank has no keys, the others have: an error on all, no hang."""
    if size == 1:
        return  # there are no others
    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        iterator = tf.data.make_initializable_iterator(dataset(rank, 9))
        fetches = model(strategy, iterator.get_next())
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), iterator.initializer])
            session.run(fetches["train"])
            if rank == 0:
                session.run(iterator.initializer)
            with pytest.raises(RankError, match="do not run the same"):
                session.run(fetches["train"])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [0, 2])
def test_an_invalid_id_is_an_error_of_its_own_batch(strategy, rank, size, at):
    """On one rank, and on all at the same step; training may go on after it."""

    def run(ahead):
        with strategy.scope(prefetch_keys=ahead, plan="quiet"), tf.Graph().as_default():
            batch = tf.data.make_one_shot_iterator(
                dataset(rank, 5, bad=at if rank == size - 1 else None)
            ).get_next()
            fetches = model(strategy, batch)
            losses = []
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for i in range(5):
                    if i == at:
                        with pytest.raises(
                            tf.errors.InvalidArgumentError, match=rf"table 't': id {V + 7} .*{V}"
                        ):
                            session.run(fetches["train"])
                    else:
                        losses.append(session.run([fetches["loss"], fetches["train"]])[0])
                losses += [float(rows.sum()) for rows in session.run(fetches["rows"])]
        return losses

    assert run(True) == run(False)


@pytest.mark.slow
def test_a_step_that_is_refused_after_its_first_exchange(strategy, rank, size, monkeypatch):
    """Ids that depend on rows turn out invalid when keys of the next batch are under way: these are
    not lost, even if another thread is slow to let them go.
    """

    def release(start):
        late = tf.numpy_function(lambda: time.sleep(0.2), [], [])
        with tf.control_dependencies([late]):
            return at_once(start)

    at_once = Start.release
    monkeypatch.setattr(Start, "release", release)
    threads = tf.ConfigProto(inter_op_parallelism_threads=4, use_per_session_threads=True)
    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            which = tf.get_variable(
                "which",
                [6, 1],
                initializer=tf.constant_initializer([[0.0], [1.0], [9.0], [2.0], [0.0], [1.0]]),
            )
            t = reference.table("t", 3, 2)
        data = tf.data.Dataset.range(6).map(
            lambda i: tf.reshape(tf.where(rank > 0, tf.constant(0, tf.int64), i), [1])
        )
        ids = tf.data.make_one_shot_iterator(data).get_next()
        chosen = tf.cast(tf.nn.embedding_lookup(which, ids)[:, 0], tf.int64)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, chosen)) + 0 * tf.reduce_sum(
            tf.nn.embedding_lookup(which, ids)
        )
        train = tf.train.GradientDescentOptimizer(0.1).minimize(
            loss, var_list=[v for v in tf.global_variables()]
        )
        seen = []
        with tf.Session(config=threads) as session:
            session.run(tf.global_variables_initializer())
            for i in range(6):
                if i == 2:
                    with pytest.raises(tf.errors.InvalidArgumentError, match="id 9"):
                        session.run([ids, train])
                else:
                    seen.append(int(session.run([ids, train])[0][0]))
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(train)
        expects("on: ")
    assert seen == ([0, 1, 3, 4, 5] if rank == 0 else [0] * 5)


def test_a_run_that_never_starts_loses_no_batch(strategy, rank, size):
    """TensorFlow refuses it for a feed's shape: one rank then trains with the batch all the same.

    (With more ranks all of them learn of the failure, and end.)
    """
    if size > 1:
        return
    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        batch = tf.data.make_one_shot_iterator(dataset(rank, 4)).get_next()
        fetches = model(strategy, batch)
        other = tf.placeholder_with_default(tf.zeros([2]), [2])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for want in batches(rank, 4):
                for _ in range(2):
                    with pytest.raises(ValueError, match="shape"):
                        session.run([fetches["train"], other], {other: np.zeros(3)})
                got = session.run([batch["ids"], fetches["train"], other])[0]
                assert np.array_equal(got, want["ids"])
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(fetches["train"])


@pytest.mark.slow
def test_a_run_outside_of_the_scope_is_refused(strategy, rank, size):
    """It doesn't wait for a batch that nobody takes."""
    with tf.Graph().as_default():
        with strategy.scope(prefetch_keys=True, plan="quiet"):
            batch = tf.data.make_one_shot_iterator(dataset(rank, 4)).get_next()
            fetches = model(strategy, batch)
            session = tf.Session()
            session.run(tf.global_variables_initializer())
            session.run(fetches["train"])
        # What is known of the data needs no peers.
        with pytest.raises(tf.errors.InvalidArgumentError, match="Run it inside `with strategy"):
            session.run(split_of(tf.get_default_graph()).stage.take)
        with strategy.scope():
            session.close()


@pytest.mark.slow
def test_a_rank_that_leaves_early(strategy, rank, size):
    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        fetches = model(strategy, tf.data.make_one_shot_iterator(dataset(rank, 9)).get_next())
        done = 0
        with tf.train.MonitoredTrainingSession("") as session:
            while not session.should_stop() and not (rank == size - 1 and done == 3):
                session.run(fetches["train"])
                done += 1
        assert done == 3


@pytest.mark.matrix
def test_a_rank_that_survives_its_failure(strategy, rank, size):
    """Its peers hear of it when it next waits for them; the session after is as ever."""
    for attempt in range(2):
        with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
            fetches = model(strategy, tf.data.make_one_shot_iterator(dataset(rank, 9)).get_next())
            with contextlib.nullcontext() if attempt else pytest.raises((KeyError, RankError)):
                with tf.train.MonitoredTrainingSession("") as session:
                    session.run(fetches["train"])
                    if not attempt and rank == size - 1:
                        raise KeyError("mine")
                    session.run(fetches["train"])


@pytest.mark.slow
def test_input_that_fails_on_one_rank(strategy, rank, size):
    """The rank gets its own error, the others one that names it; nobody hangs."""

    def checked(x):
        if rank == size - 1 and checked.calls == 2:
            raise ValueError("a broken record")
        checked.calls += 1
        return x

    checked.calls = 0

    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        batch = tf.data.make_one_shot_iterator(dataset(rank, 9)).get_next()
        batch["ids"] = tf.ensure_shape(tf.numpy_function(checked, [batch["ids"]], tf.int64), [B])
        fetches = model(strategy, batch)
        expected = tf.errors.OpError if rank == size - 1 else RankError
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(fetches["train"])
            with pytest.raises(expected, match="a broken record"):
                session.run(fetches["train"])
