"""Sessions start and end together, and no rank does alone what takes all."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from collective.coordination import barrier
from tests.ranks import grouped
from tests.ranks.coordination.test_session_kinds import build

pytestmark = [
    pytest.mark.either_backend,
    pytest.mark.ranks(1, 3),
    pytest.mark.ungrouped,
    pytest.mark.double,
    pytest.mark.carriers,
]


@pytest.fixture
def folder(tmp_path):
    """Returns rank 0's folder, which all ranks see."""
    return barrier.exchange(None, "a folder", {"path": str(tmp_path)})[0]["path"]


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("prefetch_keys", [False, True])
@pytest.mark.parametrize("stop", ["leaves", "breaks", "in an except"])
def test_a_feed_loop_of_unequal_length_ends_with_a_checkpoint(
    strategy, rank, size, folder, stop, prefetch_keys
):
    """The last rank has two batches less, and leaves; the others' next step ends as data do."""
    if stop == "in an except":
        try:
            raise KeyError("no checkpoint yet")
        except KeyError:
            feed_unequally(strategy, rank, size, folder, stop, prefetch_keys)
    else:
        feed_unequally(strategy, rank, size, folder, stop, prefetch_keys)


def feed_unequally(strategy, rank, size, folder, stop, prefetch_keys):
    with strategy.scope(plan="quiet", prefetch_keys=prefetch_keys), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        done = 0
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=100
        ) as session:
            for _ in range(4 if rank == size - 1 else 6):
                if stop == "breaks" and session.should_stop():
                    break
                session.run(f["train"], {f["ids"]: [rank, 3]})
                done += 1
    assert done == 4
    assert os.path.basename(tf.train.latest_checkpoint(folder)) == "model.ckpt-4"


@pytest.mark.parametrize("monitored", [True, False])
def test_an_evaluation_by_feeds_of_unequal_length(strategy, rank, size, monitored):
    """Who has no more to evaluate answers the others at the end of the session."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        scores = tf.reduce_sum(tf.nn.embedding_lookup(tf.global_variables()[0], f["ids"]), 1)
        want = grouped.reference.table_values(10, 2).sum(1)
        count = 2 if rank == size - 1 else 4

        def use(session):
            for i in range(count):
                np.testing.assert_allclose(
                    session.run(scores, {f["ids"]: [rank, i]}), want[[rank, i]], rtol=1e-5
                )

        if monitored:
            with tf.train.MonitoredSession() as session:
                use(session)
                done = count
            assert done == count
            return
        with tf.Session() as session:  # which ends at once
            session.run(tf.global_variables_initializer())
            if rank == size - 1:
                use(session)
            else:
                with pytest.raises(
                    RankError, match="takes all ranks, but rank .* has left the session"
                ):
                    use(session)


def test_a_checkpoint_while_others_still_answer(strategy, rank, size, folder):
    """Rank 0 has evaluated enough; the others have no more data, and come along."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ids = tf.data.make_one_shot_iterator(
            tf.data.Dataset.from_tensors(np.array([rank, 3])).repeat(9 if rank == 0 else 2)
        ).get_next()
        with strategy.embedding_scope():
            t = grouped.reference.table("t", 10, 2)
        rows, saver = tf.nn.embedding_lookup(t, ids), tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(5):
                try:
                    session.run(rows)
                except tf.errors.OutOfRangeError:
                    break
            saver.save(session, os.path.join(folder, "model"))
            session.run(tf.global_variables_initializer())
    assert tf.train.latest_checkpoint(folder)


class Final(tf.train.SessionRunHook):
    """Looks up rows at the end, which takes all ranks."""

    def __init__(self, rows):
        self._rows, self.seen = rows, None

    def end(self, session):
        self.seen = session.run(self._rows)


def test_hooks_at_the_end_look_rows_up(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        final = Final(f["rows"])
        with tf.train.MonitoredTrainingSession("", hooks=[final]) as session:
            for _ in range(2 + rank):
                session.run(f["train"], {f["ids"]: [rank, 3]})
    everyone = grouped.everyone(final.seen)
    np.testing.assert_array_equal(everyone, [everyone[0]] * size)


@pytest.mark.parametrize("before", ["train", "loss"])
@pytest.mark.parametrize("monitored", [True, False])
def test_what_one_rank_reads_at_the_end_is_no_end_of_data(strategy, rank, size, monitored, before):
    """A session would swallow that, and the rank go on without its number."""
    if size == 1:
        return
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        session = tf.train.MonitoredSession() if monitored else tf.Session()
        if not monitored:
            session.run(tf.global_variables_initializer())

        def use():
            with session:
                session.run(f[before], {f["ids"]: [rank, 3]})
                if rank == 0:
                    session.run(f["rows"])

        if rank == 0:
            with pytest.raises(
                RankError,
                match="^Runs .* takes all ranks, but rank .* (at the end of|left) the session",
            ):
                use()
        else:
            use()
        # a rank that survives its error says so when it next waits for its peers
        with tf.Session() as other:
            other.run(tf.global_variables_initializer())


def test_a_checkpoint_that_one_rank_saves_is_no_end_of_data(strategy, rank, size, folder):
    if size == 1:
        return
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(f["train"], {f["ids"]: [rank, 3]})
            if rank == 0:
                with pytest.raises(RankError, match="takes all ranks, but .* has left the session"):
                    saver.save(session, os.path.join(folder, "model"))


def test_first_values_that_one_rank_gives(strategy, rank, size):
    """An init_fn on rank 0 alone, as with Horovod, whose rank 0 tells the others."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        given = tf.assign(f["w"], [[5.0], [7.0]])
        scaffold = tf.train.Scaffold(
            init_fn=(lambda _, session: session.run(given)) if rank == 0 else None
        )
        with tf.train.MonitoredTrainingSession("", scaffold=scaffold) as session:
            np.testing.assert_array_equal(session.run(f["w"]), [[5.0], [7.0]])
    with tf.Graph().as_default():  # a graph of its own takes nobody else
        if rank == 0:
            alone = tf.get_variable("alone", [], initializer=tf.zeros_initializer())
            scaffold = tf.train.Scaffold(init_fn=lambda _, session: None)
            with (
                strategy.scope(plan="quiet"),
                tf.train.MonitoredTrainingSession("", scaffold=scaffold) as session,
            ):
                assert session.run(alone) == 0


@pytest.mark.parametrize("way", ["supervisor", "worker"])
def test_workers_and_supervisors_are_refused(strategy, rank, size, way):
    if size == 1:
        return
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        build(strategy.embedding_scope)
        with pytest.raises(NotImplementedError, match="MonitoredTrainingSession"):
            if way == "supervisor":
                tf.train.Supervisor(is_chief=rank == 0)
            else:
                tf.train.MonitoredSession(session_creator=tf.train.WorkerSessionCreator())


def test_a_fetch_of_one_ranks_own_after_an_evaluation(strategy, rank, size):
    """What could fail before any collective is settled by all ranks in the same way."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        note = tf.py_func(lambda: np.float64(1), [], tf.float64)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(f["loss"], {f["ids"]: [rank, 3]})
                session.run(
                    [f["train"], note] if rank == 0 else [f["train"]], {f["ids"]: [rank, 3]}
                )
            assert session.run(f["step"]) == 2


def test_a_session_closed_for_an_error_is_no_end(strategy, rank, size):
    """In a `finally`: the others hear of the error, and save nothing as if all were well."""
    if size == 1:
        return
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        session = tf.train.MonitoredTrainingSession("")
        with pytest.raises(KeyError if rank == size - 1 else RankError):
            try:
                session.run(f["train"], {f["ids"]: [rank, 3]})
                if rank == size - 1:
                    raise KeyError("mine")
                session.run(f["train"], {f["ids"]: [rank, 3]})
            finally:
                session.close()
        # a rank that survives its error says so when it next waits for its peers
        with tf.Session() as other:
            other.run(tf.global_variables_initializer())


def test_a_session_that_is_closed_inside_its_with(strategy, rank, size):
    """It is closed again, which is TensorFlow's error."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        with pytest.raises(RuntimeError, match="Session is already closed"):
            with tf.train.MonitoredSession() as session:
                session.run(f["train"], {f["ids"]: [rank, 3]})
                session.close()


@pytest.mark.parametrize("by", ["run", "run_step_fn"])
def test_an_error_after_which_tensorflow_makes_a_new_session(strategy, rank, size, by):
    """On several ranks it ends the session, and all are told of it, not of what came of it."""
    if size == 1:
        return

    class Unavailable(tf.train.SessionRunHook):
        runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1
            if rank == size - 1 and self.runs == 2:
                raise tf.errors.UnavailableError(None, None, "the service is down")

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        error = tf.errors.UnavailableError if rank == size - 1 else RankError
        with pytest.raises(error, match="the service is down"):
            with tf.train.MonitoredTrainingSession("", hooks=[Unavailable()]) as session:
                for _ in range(4):
                    if by == "run":
                        session.run(f["train"], {f["ids"]: [rank, 3]})
                    else:
                        session.run_step_fn(
                            lambda step_context: step_context.run_with_hooks(
                                f["train"], {f["ids"]: [rank, 3]}
                            )
                        )
        # a rank that survives its error says so when it next waits for its peers
        with tf.Session() as other:
            other.run(tf.global_variables_initializer())


@pytest.mark.sample(1)
def test_the_run_in_which_the_data_end_changes_nothing(strategy, rank):
    """Plain TensorFlow's Adam decays the moments of all rows in it, which waits for no data."""
    with strategy.scope(), tf.Graph().as_default():
        batches = tf.data.Dataset.range(2 + rank).batch(1)
        iterator = tf.data.make_initializable_iterator(batches)
        ids = iterator.get_next()
        with strategy.embedding_scope():
            table = tf.get_variable("table", [4, 1], initializer=tf.ones_initializer())
        replicated = tf.get_variable("replicated", [4, 1], initializer=tf.ones_initializer())
        rows = [tf.nn.embedding_lookup(weights, ids) for weights in (table, replicated)]
        train = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(rows))
        values = [v.read_value() for v in tf.global_variables()]
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), iterator.initializer])
            for _ in range(2):
                session.run(train)
            before = session.run(values)
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(train)
            for value, was in zip(session.run(values), before):
                np.testing.assert_array_equal(value, was)
