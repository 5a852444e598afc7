"""scope(prefetch_keys=True) changes no number, bit for bit, and no end."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import RankError, TablePolicy, every_steps
from collective.ops.graph.graph_analysis import collective_kind
from collective.prefetch.enable import split_of
from collective.strategies.grouped_exchange import groups_of
from tests.ranks.prefetched_models import B, D, V, batches, dataset, expects, model

pytestmark = pytest.mark.grouped  # only keys of groups are exchanged ahead


@pytest.mark.slow
@pytest.mark.double("matrix")
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "how, counts",
    [
        ("static", (4, 4, 4, 4)),
        ("static", (2, 0, 3, 3)),
        ("dynamic", (5, 3, 6, 4)),
        ("local_steps", (4, 6, 5, 6)),
        ("wire", (5, 3, 6, 4)),
        ("adam", (4, 4, 4, 4)),
    ],
)
def test_the_same_numbers_and_the_same_end(strategy, rank, size, how, counts):
    options = {"local_steps": {"local_steps": 2}, "wire": {"wire_dtype": tf.bfloat16}}.get(how, {})
    optimizer = tf.train.AdamOptimizer if how == "adam" else tf.train.AdagradOptimizer

    def run(ahead):
        with strategy.scope(prefetch_keys=ahead, plan="quiet", **options), tf.Graph().as_default():
            batch = tf.data.make_one_shot_iterator(dataset(rank, counts[rank])).get_next()
            fetches = model(strategy, batch, how == "dynamic", optimizer(0.1), random=True)
            out, rows = [], []

            class Last(tf.train.SessionRunHook):
                def end(self, session):
                    rows.extend(session.run(fetches["rows"]))

            with tf.train.MonitoredTrainingSession("", hooks=[Last()]) as session:
                while not session.should_stop():
                    out.append(
                        session.run({name: fetches[name] for name in ("loss", "logits", "train")})
                    )
            if ahead:
                expects("on: ")
                if size > 1:
                    assert [x.phase for x in strategy.plan().exchanges] == [
                        "agreement",
                        "agreement",
                        "keys",
                        "rows",
                        "gradients",
                        "dense gradients",
                    ]
        return out, rows

    (want, want_rows), (got, got_rows) = run(False), run(True)
    assert len(got) == len(want) == min(counts[:size])
    for a, b in zip(got, want):
        assert a["loss"] == b["loss"] and np.array_equal(a["logits"], b["logits"])
    assert all(map(np.array_equal, got_rows, want_rows))


@pytest.mark.slow
@pytest.mark.double("all")
def test_rows_go_between_steps(strategy, rank, size):
    """Rows are found in the run that uses them: no row number is held while rows move."""

    def run(ahead):
        policy = TablePolicy(steps_to_live=1, evict=every_steps(1))
        scope = strategy.scope(prefetch_keys=ahead, plan="quiet")
        with scope, tf.Graph().as_default(), strategy.embedding_scope(policy=policy):
            batch = tf.data.make_one_shot_iterator(dataset(rank, 7)).get_next()
            fetches, out = model(strategy, batch, dynamic=True), []
            with tf.train.MonitoredTrainingSession("") as session:
                for _ in range(6):
                    out.append(session.run([fetches["loss"], fetches["logits"], fetches["train"]]))
                rows = session.run(fetches["rows"])
            split = split_of(tf.get_default_graph())
            if ahead:
                expects("on: ")
                kinds = {collective_kind(op.type) for op in split.prefetched}
                assert ("Alltoall" in kinds) == (size > 1)
                assert not kinds & {"CollectiveFindRows", "ResourceScatterMax", "PyFunc"}
        return out, rows

    (want, want_rows), (got, got_rows) = run(False), run(True)
    for a, b in zip(got, want):
        assert a[0] == b[0] and np.array_equal(a[1], b[1])
    assert all(map(np.array_equal, got_rows, want_rows))
    in_use = want_rows[0].any(1)
    assert 0 < np.count_nonzero(in_use) < V  # what the last batches looked up


@pytest.mark.matrix
def test_the_next_batch_is_taken_while_this_one_computes(strategy, rank, size):
    """Closing the session waits for the keys of the batch that nobody takes."""

    def run(ahead):
        taken, options = [], tf2.data.Options()
        # TensorFlow's own may be one batch ahead, or not
        options.experimental_optimization.inject_prefetch = False
        with strategy.scope(prefetch_keys=ahead, plan="quiet"), tf.Graph().as_default():
            source = dataset(rank, 9, taken=taken).with_options(options)
            fetches = model(strategy, tf.data.make_one_shot_iterator(source).get_next())
            with tf.train.MonitoredTrainingSession("") as session:
                for _ in range(3):
                    session.run(fetches["train"])
        return len(taken)

    assert run(True) == run(False) + 1


def test_what_a_script_fetches_of_a_batch_is_of_the_batch_it_trains_on(strategy, rank, size):
    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        batch = tf.data.make_one_shot_iterator(dataset(rank, 5)).get_next()
        fetches = model(strategy, batch)
        with tf.train.MonitoredTrainingSession("") as session:
            for want in batches(rank, 5):
                got = session.run(
                    {
                        "batch": batch,
                        "train": fetches["train"],
                        "op": batch["x"].op,
                        "name": batch["y"].name,
                        "sparse": tf.SparseTensorValue(
                            batch["places"], batch["values"], batch["y"]
                        ),
                    }
                )
                assert got["op"] is None and got["train"] is None
                for name, value in want.items():
                    assert np.array_equal(got["batch"][name], value), name
                assert np.array_equal(got["name"], want["y"])
                assert np.array_equal(got["sparse"].values, want["values"])
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(batch["x"])


@pytest.mark.matrix
def test_evaluation_of_unequal_data_with_the_same_iterator(strategy, rank, size):
    """No record is passed over in silence: where a rank can't answer the others, that is an error
    on all.
    """
    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        iterator = tf.data.make_initializable_iterator(dataset(rank, 2 + (rank == 0)))
        fetches = model(strategy, iterator.get_next())
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), iterator.initializer])
            for _ in range(2):
                session.run(fetches["train"])
            with pytest.raises(tf.errors.OutOfRangeError):
                for _ in range(2):
                    session.run(fetches["train"])
            session.run(iterator.initializer)
            for _ in range(2):
                session.run(fetches["logits"])
            if size == 1:
                session.run(fetches["logits"])
            else:
                with pytest.raises(RankError, match="prefetch_keys"):
                    session.run(fetches["logits"])


@pytest.mark.matrix
def test_a_batch_that_is_fed(strategy, rank, size):
    """It comes between those of the iterator, as it does without."""

    def run(ahead):
        with strategy.scope(prefetch_keys=ahead, plan="quiet"), tf.Graph().as_default():
            batch = tf.data.make_one_shot_iterator(dataset(rank, 5)).get_next()
            fetches = model(strategy, batch)
            other = next(batches(rank + 10, 1))
            losses = []
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for i in range(7):
                    feed = {batch[name]: other[name] for name in other} if i in (0, 3) else {}
                    losses.append(session.run([fetches["loss"], fetches["train"]], feed)[0])
                if ahead:
                    with pytest.raises(
                        ValueError, match="Feed all that the model takes of the batch"
                    ):
                        session.run(fetches["train"], {batch["ids"]: other["ids"]})
                with pytest.raises(tf.errors.OutOfRangeError):
                    session.run(fetches["train"])
                losses.append(session.run(fetches["rows"]))
        return losses

    for a, b in zip(run(True), run(False)):
        assert all(map(np.array_equal, a, b)) if isinstance(a, list) else a == b


@pytest.mark.matrix
def test_two_sessions_in_turn(strategy, rank, size):
    """Of two graphs with the same lookups, each with keys under way while the other runs."""

    def run(ahead):
        losses = []
        with strategy.scope(prefetch_keys=ahead, plan="quiet"), contextlib.ExitStack() as stack:
            made = []
            for _ in range(2):
                with tf.Graph().as_default() as graph:
                    fetches = model(
                        strategy, tf.data.make_one_shot_iterator(dataset(rank, 4)).get_next()
                    )
                    # not entered: contexts of two graphs must be left in order
                    session = tf.Session(graph=graph)
                    stack.callback(session.close)
                    session.run(tf.global_variables_initializer())
                    made.append((session, fetches))
            for _ in range(4):
                losses += [
                    session.run([fetches["loss"], fetches["train"]])[0] for session, fetches in made
                ]
        return losses

    assert run(True) == run(False)


@pytest.mark.matrix
def test_an_iterator_that_starts_again(strategy, rank, size):
    """In the middle, and at the end of the data, which ranks have different amounts of."""

    def run(ahead):
        with strategy.scope(prefetch_keys=ahead, plan="quiet"), tf.Graph().as_default():
            iterator = tf.data.make_initializable_iterator(dataset(rank, 3 + rank))
            fetches = model(strategy, iterator.get_next())
            losses = []
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for steps in (1, 2, 9, 9):
                    session.run(iterator.initializer)
                    try:
                        for _ in range(steps):
                            losses.append(session.run([fetches["loss"], fetches["train"]])[0])
                    except tf.errors.OutOfRangeError:
                        losses.append(None)
        return losses

    want = run(False)
    assert run(True) == want and want.count(None) == 2


@pytest.mark.matrix
def test_runs_of_something_else_in_between(strategy, rank, size):
    """Evaluation with data of its own, unequal ones, while keys of the next batch are under way;
    saving.
    """

    def run(ahead):
        with strategy.scope(prefetch_keys=ahead, plan="quiet"), tf.Graph().as_default():
            batch = tf.data.make_one_shot_iterator(dataset(rank, 6)).get_next()
            fetches = model(strategy, batch)
            with tf.variable_scope("", reuse=True), strategy.embedding_scope():
                again = tf.get_variable("t", [V, D])
            held_out = tf.data.make_initializable_iterator(tf.data.Dataset.range(2 + rank).batch(1))
            score = tf.reduce_sum(tf.nn.embedding_lookup(again, held_out.get_next()))
            out = []
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for _ in range(3):
                    out += [session.run([fetches["loss"], fetches["train"]])[0] for _ in range(2)]
                    session.run(held_out.initializer)
                    try:
                        while True:
                            out.append(session.run(score))
                    except tf.errors.OutOfRangeError:
                        out.append(None)
            if ahead:
                expects("on: ")
        return out

    assert run(True) == run(False)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "why",
    [
        "placeholder",
        "several",
        "variable",
        "constant",
        "queue",
        "ungrouped",
        "early",
        "cond",
        "branch",
        "nothing",
    ],
)
def test_where_it_is_off_the_plan_says_why(strategy, rank, size, why):
    with (
        strategy.scope(prefetch_keys=True, plan="quiet", grouping=why != "ungrouped"),
        tf.Graph().as_default(),
    ):
        batch = tf.data.make_one_shot_iterator(dataset(rank, 2)).get_next()
        other = tf.data.make_one_shot_iterator(dataset(rank, 2)).get_next()
        feed, ids = {}, batch["ids"]
        if why == "placeholder":
            ids = tf.placeholder(tf.int64, [B], "which")
            feed = {ids: np.zeros(B, np.int64)}
        elif why == "several":
            ids = other["ids"]
        elif why == "variable":
            counter = tf.get_variable(
                "counter", [], tf.int64, tf.zeros_initializer(), trainable=False
            )
            ids = (ids + counter) % V
        elif why == "branch":
            counter = tf.get_variable(
                "counter", [], tf.int64, tf.zeros_initializer(), trainable=False, use_resource=True
            )
            ids = tf.cond(tf.reduce_sum(ids) > 0, lambda: (ids + counter) % V, lambda: ids)
        elif why == "queue":
            queue = tf.queue.FIFOQueue(9, [tf.int64], [[B]])
            ids = queue.dequeue()
            fill = queue.enqueue_many(np.zeros([2, B], np.int64))
        elif why == "cond":
            tf.disable_control_flow_v2()
            try:
                ids = tf.cond(tf.reduce_sum(ids) > 0, lambda: ids, lambda: ids + 1)
            finally:
                tf.enable_control_flow_v2()
        elif why == "early":
            with tf.Session() as session:
                session.run(tf.constant(1))
        if why == "constant":
            batch = {name: tf.constant(value) for name, value in next(batches(rank, 1)).items()}
            ids = batch["ids"]
        fetches = model(strategy, {**batch, "ids": ids})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if why == "queue":
                session.run(fill)
            session.run(fetches["train"], feed)
        expects(
            {
                "placeholder": "off: keys depend on the placeholder 'which'",
                "several": "off: keys come from several iterators",
                "branch": "off: keys depend on the variable 'counter'",
                "variable": "off: keys depend on the variable 'counter'",
                "constant": "off: keys come from no tf.data iterator",
                "queue": "off: keys come from 'fifo_queue_Dequeue' (QueueDequeueV2)",
                "ungrouped": "off: no lookup with gradients",
                "early": "off: a session had run 'IteratorGetNext'",
                "cond": "off: keys pass through tf.cond",
                "nothing": "on: ",
            }[why],
        )
        assert (split_of(tf.get_default_graph()) is None) == (why != "nothing")


def test_gradients_that_were_taken_outside_are_warned_of(strategy, rank, size, caplog):
    """Once, by the tables' names; where owners don't answer keys as they come they do no harm."""
    with tf.Graph().as_default(), caplog.at_level("WARNING", "tensorflow"):
        with strategy.scope(plan="quiet"):
            batch = tf.data.make_one_shot_iterator(dataset(rank, 3)).get_next()
            fetches = model(strategy, batch)
        with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(fetches["train"])
        answered = any(group.answered for group in groups_of(tf.get_default_graph()))
    words = "gradients of lookups in 't', 'u' were taken outside of that scope. Call tf.gradients"
    assert caplog.text.count(words) == (answered and size > 1)


@pytest.mark.slow
def test_what_is_added_after_a_run_sees_the_batch_of_its_run(strategy, rank, size):
    with strategy.scope(prefetch_keys=True, plan="quiet"), tf.Graph().as_default():
        batch = tf.data.make_one_shot_iterator(dataset(rank, 5)).get_next()
        fetches = model(strategy, batch)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(fetches["train"])
            doubled = 2 * batch["x"]
            got = session.run([doubled, fetches["train"]])[0]
            slope = session.run(tf.gradients(tf.reduce_sum(fetches["logits"]), batch["x"])[0])
    assert np.array_equal(got, 2 * list(batches(rank, 2))[1]["x"])
    assert slope.shape == (B, 2) and np.all(slope != 0)
