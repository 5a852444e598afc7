"""However many metrics a step has, their sums over ranks take one exchange."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.ops.metrics_impl import metric_variable

from collective import RankError
from collective.coordination import run_analysis
from collective.ops.graph import graph_analysis
from tests.ranks import metric_programs

pytestmark = pytest.mark.double
RECORDS = 8


def records(r):
    rng = np.random.default_rng([3, r])
    return rng.random(RECORDS, np.float32), rng.integers(0, 2, RECORDS).astype(np.float32)


def everything(size):
    return [np.concatenate(x) for x in zip(*map(records, range(size)))]


def sums(fetches):
    """Returns the reductions over ranks that a run of `fetches` takes."""
    footprint = run_analysis.footprint_of(tf.get_default_graph(), tf.nest.flatten(fetches), ())
    kinds = ("Allreduce", "Allgather")
    return [op for op in footprint.operations if graph_analysis.collective_kind(op.type) in kinds]


def initialize(session):
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])


def ten_metrics(score, label, weight):
    """Some wait for a lookup, others for no exchange."""
    said = tf.round(score * weight)
    return [
        tf.metrics.auc(label, score),
        tf.metrics.accuracy(label, said),
        tf.metrics.precision(label, said),
        tf.metrics.recall(label, said),
        tf.metrics.mean(score),
        tf.metrics.mean(label, name="base_rate"),
        tf.metrics.mean_absolute_error(label, score),
        tf.metrics.root_mean_squared_error(label, score),
        tf.metrics.false_positives(label, said),
        metric_programs.counter_by_assign(score, label),
    ]


@pytest.mark.slow
def test_ten_metrics_take_one_exchange(strategy, rank, size):
    want = None
    for shards in ([everything(size)], [records(rank)]):
        with tf.Graph().as_default() as graph:
            with strategy.scope() if want else tf.name_scope(""):
                score, label = map(tf.constant, shards[0])
                with strategy.embedding_scope() if want else tf.name_scope(""):
                    table = tf.get_variable("one", [4, 1], initializer=tf.ones_initializer())
                weight = tf.nn.embedding_lookup(table, tf.constant([3]))[0]
                values, updates = zip(*ten_metrics(score, label, weight))
                with tf.Session() as session:
                    initialize(session)
                    updated, got = session.run(updates), session.run(values)
                if want and size > 1:
                    assert len(sums(updates)) == len(sums(values)) == 1
        if want:
            for one, other in zip([*updated, *got], want):
                np.testing.assert_allclose(one, other, rtol=1e-5)
        want = [*updated, *got]
        del graph


def test_largest_and_smallest_values_have_exchanges_of_their_own(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        score, label = map(tf.constant, records(rank))
        made = [
            f(score, label)
            for f in (metric_programs.largest, metric_programs.smallest, metric_programs.counter)
        ] + [tf.metrics.mean(label)]
        values, updates = zip(*made)
        with tf.Session() as session:
            initialize(session)
            session.run(updates)
            got = session.run(values)
        assert size == 1 or len(sums(values)) == 4  # counter's integers, too
    scores, labels = everything(size)
    np.testing.assert_allclose(
        got, [scores.max(), scores.min(), scores.mean(), labels.mean()], rtol=1e-5
    )


def test_a_run_takes_no_data_of_metrics_that_it_does_not_need(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        one, other = (
            tf.data.make_one_shot_iterator(
                tf.data.Dataset.from_tensor_slices(np.float32(range(3)) + 10 * i + rank)
            ).get_next()
            for i in range(2)
        )
        (_, first), (value, second) = tf.metrics.mean(one), tf.metrics.mean(other, name="other")
        ranks = np.arange(size)
        with tf.Session() as session:
            initialize(session)
            np.testing.assert_allclose(session.run([first, second]), ranks.mean() + [0, 10])
            np.testing.assert_allclose(session.run(first), ranks.mean() + 0.5)
            np.testing.assert_allclose(session.run(first), ranks.mean() + 1)
            np.testing.assert_allclose(session.run(value), ranks.mean() + 10)
            np.testing.assert_allclose(session.run(second), ranks.mean() + 10.5)
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(first)


def test_an_update_that_only_has_to_be_over(strategy, rank, size):
    """Nobody looks at its sum: data of other metrics stay where they are all the same."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("waits", [4, 2], initializer=tf.ones_initializer())
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([1, 2])))
        x = tf.data.make_one_shot_iterator(
            tf.data.Dataset.from_tensor_slices(np.float32(range(3)) + rank)
        ).get_next()
        (value, update), (_, other) = tf.metrics.mean(loss), tf.metrics.mean(x, name="other")
        with tf.control_dependencies([update]):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            initialize(session)
            for _ in range(4):
                session.run(train)
            np.testing.assert_allclose(session.run(other), np.arange(size).mean())
            assert 2.0 < session.run(value) < 4.0


def test_a_rank_without_data_adds_its_state_to_the_metrics_that_are_needed(strategy, rank, size):
    have = 4 if rank == 0 else 1
    with strategy.scope(), tf.Graph().as_default():
        x = tf.data.make_one_shot_iterator(
            tf.data.Dataset.from_tensor_slices(np.full(have, rank, np.float32))
        ).get_next()
        (_, first), _ = tf.metrics.mean(x), tf.metrics.mean(x * 2, name="not_needed")
        last = None
        with tf.Session() as session:
            initialize(session)
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    last = session.run(first)
    if rank == 0:
        np.testing.assert_allclose(last, np.sum(range(size)) / (3 + size), rtol=1e-6)


def test_a_metric_of_another_ones_value(strategy, rank, size):
    """It takes a second exchange, which waits for the first."""
    with strategy.scope(), tf.Graph().as_default():
        score, label = map(tf.constant, records(rank))
        _, mean = tf.metrics.mean(score)
        _, above = tf.metrics.mean(tf.cast(score > mean, tf.float32), name="above")
        with tf.Session() as session:
            initialize(session)
            got = session.run([mean, above])
        assert size == 1 or len(sums([mean, above])) == 2
    scores, _ = everything(size)
    np.testing.assert_allclose(got, [scores.mean(), (scores > scores.mean()).mean()], rtol=1e-5)


def test_an_update_by_a_state_that_is_read_after_its_update(strategy, rank, size):
    """The state's sum, what is read after it, and the other metric's sum come in turn."""
    with strategy.scope(), tf.Graph().as_default():
        score, label = map(tf.constant, records(rank))
        total = metric_variable([], tf.float32, name="total")
        with tf.control_dependencies([tf.assign_add(total, tf.reduce_sum(score))]):
            seen = tf.identity(total)
        _, left = tf.metrics.mean(label - seen)
        with tf.Session() as session:
            initialize(session)
            got = session.run(left)
    scores, labels = everything(size)
    np.testing.assert_allclose(got, labels.mean() - scores.sum(), rtol=1e-5)


def test_ranks_that_need_different_metrics_are_told(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        score, label = map(tf.constant, records(rank))
        (_, first), (_, second) = tf.metrics.mean(score, name="a"), tf.metrics.mean(label, name="b")
        with tf.Session() as session:
            initialize(session)
            session.run([first, second])
            with pytest.raises(RankError, match=r"the ranks' sum of 'b/count/updated'"):
                session.run([first, second] if rank == 0 else first)
