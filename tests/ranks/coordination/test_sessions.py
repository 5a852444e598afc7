"""Ranks stay together: a step happens on all of them or on none, and they end and fail alike."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, TableError
from collective.ops.communication.horovod_library import hvd
from tests.ranks import reference

pytestmark = [pytest.mark.either_backend, pytest.mark.carriers]

START = reference.table_values(10, 2)


def build(embedding_scope, ids, seed=None):
    """Builds a table, a dense weight and a global step.

    The weight starts again on each rank, unless `seed` is given.
    """
    with embedding_scope():
        t = reference.table("t", 10, 2)
    w = tf.get_variable("w", [2, 1], initializer=tf.random_normal_initializer(seed=seed))
    emb = tf.nn.embedding_lookup(t, ids)
    loss = tf.reduce_mean(tf.square(tf.matmul(tf.reshape(emb, [-1, 2]), w)))
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    return {
        "emb": emb,
        "loss": loss,
        "train": train,
        "w": w,
        "step": step,
        "rows": tf.nn.embedding_lookup(t, tf.range(10)),
    }


def placeholder():
    return tf.placeholder(tf.int64, [None], "ids")


def fed(ids):
    return {"ids:0": ids}


@pytest.mark.sample(3)
@pytest.mark.parametrize("counts", [(3, 5, 0, 4), (3, 5, 4, 6), (2, 2, 2, 2), (0, 1, 1, 1)])
@pytest.mark.parametrize(
    "source", ["one_shot", "initializable", "queue", "generator", "branch", "feedable"]
)
def test_unequal_data_ends_at_the_same_step(strategy, rank, size, counts, source):
    """Every rank takes min(counts) steps, whose losses are those of plain TensorFlow on all ranks'
    batches together.
    """
    mine = counts[rank]
    with strategy.scope(), tf.Graph().as_default():
        data = tf.data.Dataset.from_tensors(np.array([rank, 5], np.int64)).repeat(mine)
        if source == "queue":
            values = (
                tf.train.limit_epochs(tf.constant([rank, 5], tf.int64), num_epochs=mine)
                if mine
                else None
            )
            if values is None:
                ids = tf.data.make_one_shot_iterator(data).get_next()
            else:
                queue = tf.queue.FIFOQueue(10, [tf.int64], [[2]])
                tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue([values])]))
                ids = queue.dequeue()
        elif source == "generator":
            left = iter(range(mine))

            def produce():
                next(left)
                return np.array([rank, 5], np.int64)

            ids = tf.numpy_function(produce, [], tf.int64)
            ids.set_shape([2])
        elif source == "branch":
            one, other = (tf.data.make_one_shot_iterator(data) for _ in range(2))
            ids = tf.cond(tf.constant(1.0) > 0, one.get_next, other.get_next)
        elif source == "feedable":
            one = tf.data.make_one_shot_iterator(data)
            handle = one.string_handle()
            ids = tf.data.Iterator.from_string_handle(
                handle, tf.data.get_output_types(data), tf.data.get_output_shapes(data)
            ).get_next()
        elif source == "initializable":
            iterator = tf.data.make_initializable_iterator(data)
            tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
            ids = iterator.get_next()
        else:
            ids = tf.data.make_one_shot_iterator(data).get_next()
        fetches = build(strategy.embedding_scope, ids, seed=1)
        losses = []
        with tf.train.MonitoredTrainingSession("") as session:
            while not session.should_stop():
                losses.append(session.run([fetches["loss"], fetches["train"]])[0])
    assert len(losses) == min(counts[:size])
    with tf.Graph().as_default():
        fetches = build(
            contextlib.nullcontext, tf.constant([[r, 5] for r in range(size)], tf.int64), seed=1
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            want = [session.run([fetches["loss"], fetches["train"]])[0] for _ in losses]
    np.testing.assert_allclose(np.mean(_everyone(losses), 0) if losses else [], want, rtol=1e-5)


def test_a_plain_session_meets_the_end_as_an_error_and_goes_on(strategy, rank, size):
    """Two epochs over unequal data with an initializable iterator: the end is no reason to close
    the session.
    """
    with strategy.scope(), tf.Graph().as_default():
        data = tf.data.Dataset.from_tensors(np.array([1], np.int64)).repeat(2 + rank)
        iterator = tf.data.make_initializable_iterator(data)
        fetches = build(strategy.embedding_scope, iterator.get_next())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(iterator.initializer)
                steps = 0
                with pytest.raises(tf.errors.OutOfRangeError):
                    while True:
                        session.run(fetches["train"])
                        steps += 1
                assert steps == 2
            assert session.run(fetches["step"]) == 4


def test_a_feed_loop_that_ends_earlier_on_one_rank(strategy, rank, size):
    counts, done = (4, 2, 6, 3), 0
    with strategy.scope(), tf.Graph().as_default():
        fetches = build(strategy.embedding_scope, placeholder())
        with tf.train.MonitoredTrainingSession("") as session:
            for _ in range(counts[rank]):
                if session.should_stop():
                    break
                session.run(fetches["train"], fed([rank]))
                done += 1
    assert done == min(counts[:size])


def test_constants_that_make_an_exchange_useless(strategy, rank, size):
    """The graph optimizer must not drop it on the rank that has them: others wait for it."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        mask = tf.constant([float(rank > 0)] * 2)
        with strategy.embedding_scope():
            fixed = tf.get_variable("t", [4, 2], trainable=False)
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        rows = tf.nn.embedding_lookup(fixed, [1, 3])[:, 0] * mask
        losses = [
            tf.losses.mean_squared_error([3.0, 3.0], w + rows, mask),
            tf.reduce_sum(w * mask) / (hvd.allreduce(tf.reduce_sum(mask)) if size > 1 else 1.0),
        ]
        for loss in losses:
            step = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            with tf.train.MonitoredTrainingSession() as session:
                session.run(step)


def test_constant_ids(strategy, rank, size):
    """The graph optimizer must not run a lookup of constants ahead of time."""

    def make(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 10, 2)
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, [1, 1, 7])))
        return {
            "train": tf.train.AdamOptimizer(0.1).minimize(loss),
            "loss": loss,
            "rows": tf.nn.embedding_lookup(t, tf.range(10)),
        }, {}

    runs = [(["train", "loss"], {})] * 3 + [(["rows"], {})]
    want, got = reference.plain(make, runs), reference.sharded(strategy, make, runs)
    np.testing.assert_allclose(got[-1]["rows"], want[-1]["rows"], rtol=1e-5)


def test_an_early_session(strategy, rank, size):
    def make(embedding_scope):
        assert tf.Session().run(tf.constant(1)) == 1
        with embedding_scope():
            t = reference.table("t", 10, 2)
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, [2, 3])))
        return {
            "train": tf.train.AdagradOptimizer(0.1).minimize(loss),
            "rows": tf.nn.embedding_lookup(t, tf.range(10)),
        }, {}

    runs = [(["train"], {}), (["rows"], {})]
    np.testing.assert_allclose(
        reference.sharded(strategy, make, runs)[1]["rows"],
        reference.plain(make, runs)[1]["rows"],
        rtol=1e-5,
    )


@pytest.mark.parametrize("bad", [10, -1, 2**40, -(2**62)])
def test_an_invalid_id_on_one_rank_raises_on_all_and_changes_nothing(strategy, rank, size, bad):
    with strategy.scope(), tf.Graph().as_default():
        fetches = build(strategy.embedding_scope, placeholder())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(fetches["train"], fed([1, 2]))
            state = [fetches[name] for name in ("rows", "w", "step")]
            before = session.run(state)
            with pytest.raises(tf.errors.InvalidArgumentError) as raised:
                session.run(
                    [fetches["train"], fetches["emb"]],
                    fed([3, bad] if rank == size - 1 else [3, 4]),
                )
            after = session.run(state)
            session.run(fetches["train"], fed([1, 2]))  # and the session goes on
    assert f"table 't': id {bad} is not in [0, 10)" in str(raised.value)
    for a, b in zip(before, after):
        np.testing.assert_array_equal(a, b)


def test_an_invalid_id_after_another_lookup(strategy, rank, size):
    """Known only after the first exchange: still raised on every rank, with nothing applied."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            a = tf.get_variable(
                "a", [4, 1], initializer=tf.constant_initializer([[0.0], [1.0], [2.0], [30.0]])
            )
            b = tf.get_variable("b", [5, 1], initializer=tf.ones_initializer())
        ids = placeholder()
        first = tf.nn.embedding_lookup(a, ids)
        second = tf.nn.embedding_lookup(b, tf.cast(first[:, 0], tf.int64))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(
            tf.reduce_mean(first) + tf.reduce_mean(second)
        )
        rows = tf.nn.embedding_lookup(a, tf.range(4))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.InvalidArgumentError, match="30"):
                session.run(train, fed([3] if rank == size - 1 else [1]))
            np.testing.assert_array_equal(session.run(rows)[:, 0], [0, 1, 2, 30])


def test_different_fetches_are_an_error_on_all(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        fetches = build(strategy.embedding_scope, placeholder())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(RankError) as raised:
                session.run(fetches["emb"] if rank == 0 else fetches["train"], fed([1]))
    assert "embedding_lookup:0" in str(raised.value) and "Adagrad" in str(raised.value)


def test_initializing_different_variables_is_an_error_on_all(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        build(strategy.embedding_scope, placeholder())
        a, b = tf.get_variable("a", [2]), tf.get_variable("b", [2])
        with tf.Session() as session:
            with pytest.raises(RankError, match="initialize a:0"):
                session.run(a.initializer if rank == 0 else b.initializer)


def test_a_rank_leaves_while_another_asks_for_an_invalid_id(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        fetches = build(strategy.embedding_scope, placeholder())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if rank == 0:
                with pytest.raises(tf.errors.InvalidArgumentError, match="id 100 "):
                    session.run(fetches["emb"], fed([100]))


def test_every_rank_is_a_chief(strategy, rank, size):
    """Scripts for parameter servers pass is_chief=(task == 0): the others would wait for a chief
    that isn't theirs.
    """
    with strategy.scope(), tf.Graph().as_default():
        fetches = build(strategy.embedding_scope, placeholder())
        with tf.train.MonitoredTrainingSession("", is_chief=rank == 0) as session:
            session.run(fetches["train"], fed([1]))
        with tf.train.MonitoredTrainingSession("", rank == 0, None) as session:
            session.run(fetches["train"], fed([1]))


def test_replicated_variables_start_equal(strategy, rank, size):
    """Without a seed, and also where an init_fn gives each rank values of its own."""
    for own_values in (False, True):
        with strategy.scope(), tf.Graph().as_default():
            fetches = build(strategy.embedding_scope, placeholder())
            w = fetches["w"]

            def init_fn(scaffold, session, w=w):
                w.load(np.full([2, 1], rank, np.float32), session)

            scaffold = tf.train.Scaffold(init_fn=init_fn if own_values else None)
            with tf.train.MonitoredTrainingSession("", scaffold=scaffold) as session:
                mine = session.run(w)
        everyone = np.array(_everyone(mine))
        assert (everyone == everyone[0]).all()


def _everyone(value):
    import horovod.tensorflow as hvd

    return hvd.allgather_object(value)


def test_unused_and_uncollective_runs_are_this_ranks_own(strategy, rank, size):
    """A rank may run what needs no peer as often as it likes."""
    with strategy.scope(), tf.Graph().as_default():
        fetches = build(strategy.embedding_scope, placeholder())
        with tf.train.MonitoredTrainingSession("") as session:
            for _ in range(rank * 3):
                session.run(fetches["w"])
            session.run(fetches["train"], fed([1]))


def test_a_callable_is_a_run(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        ids = placeholder()
        fetches = build(strategy.embedding_scope, ids)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            call = session.make_callable(fetches["emb"], [ids])
            np.testing.assert_array_equal(call([1, 9]), START[[1, 9]])


def test_reading_a_shard_by_hand_names_the_table(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", 10, 2)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            by_hand = tf.raw_ops.ReadVariableOp(resource=t.handle, dtype=tf.float32)
            for fetch in ("t/Read/ReadVariableOp:0", by_hand):
                with pytest.raises(TableError, match="table 't'.*of its 10 rows"):
                    session.run(fetch)


def test_a_queue_filled_and_drained_in_one_run(strategy, rank, size):
    """Its end is no end of data that could be known before the exchange which fills it."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", 10, 2)
        queue = tf.queue.FIFOQueue(4, [tf.float32], [[2]])
        put, got = (
            queue.enqueue(tf.reduce_sum(tf.nn.embedding_lookup(t, [1, 2]), 0)),
            queue.dequeue(),
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_allclose(session.run([got, put])[0], START[1] + START[2], rtol=1e-6)


def test_a_session_outside_scope_says_so(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default() as graph:
        fetches = build(strategy.embedding_scope, placeholder())
    with tf.Session(graph=graph) as session:
        session.run([v.initializer for v in graph.get_collection("variables")])
        with pytest.raises(tf.errors.InvalidArgumentError, match="inside `with strategy.scope"):
            session.run(fetches["emb"], fed([1]))


def test_rank_0_alone_writes_summaries(strategy, rank, size, tmp_path):
    with strategy.scope(), tf.Graph().as_default():
        fetches = build(strategy.embedding_scope, placeholder())
        tf.summary.scalar("loss", fetches["loss"])
        with tf.train.MonitoredTrainingSession(
            "", summary_dir=str(tmp_path / "events"), save_summaries_steps=1
        ) as session:
            session.run(fetches["train"], fed([1]))
        written = (
            list((tmp_path / "events").glob("events*")) if (tmp_path / "events").exists() else []
        )
    assert bool(written) == (rank == 0)
    tf.summary.FileWriterCache.clear()


def test_ranks_that_survive_a_failure_of_one_go_on_in_step(strategy, rank, size):
    """A notebook's retry: the rank that raised and those that were told both catch it, and the next
    session is as ever.
    """
    if size == 1:
        return
    for attempt in range(4):  # the last one must not fail: only a rank that waits again tells
        with strategy.scope(), tf.Graph().as_default():
            fetches = build(strategy.embedding_scope, tf.constant([rank, 5], tf.int64))
            with (
                pytest.raises((KeyError, RankError))
                if attempt % 2 == 0
                else contextlib.nullcontext()
            ):
                with tf.train.MonitoredTrainingSession("") as session:
                    session.run(fetches["train"])
                    if attempt % 2 == 0 and rank == 1:
                        raise KeyError("mine")
                    session.run(fetches["train"])
