"""A dataset that every rank reads whole is noticed; what ranks may have alike is not."""

import contextlib
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.monitoring import input_check
from collective.prefetch import enable
from tests.ranks import estimators, reference

pytestmark = pytest.mark.either_backend

ROWS, DIM, STEPS = 40, 2, 6
IDS = np.random.default_rng(5).integers(0, ROWS, [STEPS, 4])


def train_on(ids):
    """Makes a train_op on batches of ids."""
    table = reference.table("t", ROWS, DIM)
    loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, ids)))
    return tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())


@contextlib.contextmanager
def noticed(times):
    """Asserts how many warnings there are on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [w for w in caught if "every rank trains on the same records" in str(w.message)]
    assert len(found) == times


def run(strategy, dataset, steps=STEPS, ids=lambda batch: batch, **scope):
    """Trains on a dataset; returns the graph."""
    with strategy.scope(plan="quiet", **scope), tf.Graph().as_default() as graph:
        batch = tf.data.make_one_shot_iterator(dataset()).get_next()
        with strategy.embedding_scope():
            train = train_on(ids(batch))
        with tf.train.MonitoredTrainingSession("") as session:
            for _ in range(steps):
                session.run(train)
    return graph


def whole():
    return tf.data.Dataset.from_tensor_slices(IDS).repeat()


def sparse():
    def rows(ids):
        return tf.sparse.from_dense(tf.reshape(ids + 1, [2, 2]))

    return whole().map(rows)


FORMS = {
    "ids": (whole, lambda batch: batch),
    "records": (
        lambda: whole().map(lambda ids: {"ids": ids, "text": tf.as_string(ids)}),
        lambda batch: batch["ids"],
    ),
    "sparse": (sparse, lambda batch: batch.values - 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_dataset_that_every_rank_reads_whole(strategy, rank, size, form):
    dataset, ids = FORMS[form]
    with noticed(times=rank == 0 and size > 1):
        graph = run(strategy, dataset, ids=ids)
    if size > 1:
        assert input_check.check_of(graph).runs == input_check.SAME_BATCHES


@pytest.mark.parametrize("form", FORMS)
def test_shard_is_the_fix(strategy, size, form):
    dataset, ids = FORMS[form]
    with noticed(times=0):
        graph = run(strategy, lambda: strategy.shard(dataset()), ids=ids)
    if size > 1:
        assert input_check.check_of(graph).runs == 1, "no step after the first costs anything"


def test_with_keys_exchanged_ahead(strategy, rank, size):
    with noticed(times=rank == 0 and size > 1):
        graph = run(strategy, whole, prefetch_keys=True)
    if size > 1:
        assert enable.note_of(graph).startswith("on")


@pytest.mark.parametrize(
    "dataset, steps",
    [
        (lambda: tf.data.Dataset.from_tensors(IDS[0]).repeat(), 2 * input_check.MOST_RUNS),
        (lambda: tf.data.Dataset.from_tensor_slices(IDS[:2]).repeat(), 5),
        (lambda: tf.data.Dataset.from_tensor_slices(IDS), input_check.SAME_BATCHES - 1),
    ],
    ids=["constant", "two batches", "few steps"],
)
def test_what_is_constant_or_tiny_is_no_mistake(strategy, dataset, steps):
    with noticed(times=0):
        run(strategy, dataset, steps)


def test_what_is_fed_and_what_is_evaluated_is_not_compared(strategy, size):
    with (
        noticed(times=0),
        strategy.scope(plan="quiet"),
        tf.Graph().as_default() as graph,
    ):
        ids = tf.placeholder(tf.int64, [None])
        with strategy.embedding_scope():
            train = train_on(ids)
        table = next(v for v in tf.global_variables() if v.op.name == "t")
        batch = tf.data.make_one_shot_iterator(whole()).get_next()
        rows = tf.nn.embedding_lookup(table, batch)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for i in range(STEPS):
                session.run(rows)
                session.run(train, {ids: IDS[i]})
    if size > 1:
        assert input_check.check_of(graph).runs == 1


def test_ranks_of_which_one_feeds_what_the_others_read(strategy, rank, size):
    with noticed(times=0), strategy.scope(plan="quiet"), tf.Graph().as_default():
        batch = tf.data.make_one_shot_iterator(whole()).get_next()
        with strategy.embedding_scope():
            train = train_on(batch)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for i in range(STEPS):
                session.run(train, {batch: IDS[i]} if rank == 0 else None)


@pytest.mark.matrix
def test_what_an_estimator_deals_is_not_compared(strategy, rank, size, folder):
    """With shard_input=False it deals nothing, and every rank reads all."""
    for shard, times in ((True, 0), (False, int(rank == 0 and size > 1))):
        estimator = estimators.made(strategy, f"{folder}/{shard}", shard=shard)
        with noticed(times):
            estimator.train(estimators.records(40), steps=4)


def test_the_numbers_are_those_of_a_run_that_reads_nothing_else(strategy, size, monkeypatch):
    """To the bit, with random numbers: nothing is drawn or read another time."""

    def losses():
        out = []
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            tf.set_random_seed(3)
            ids = tf.data.make_one_shot_iterator(whole().shuffle(6, seed=1)).get_next()
            with strategy.embedding_scope():
                table = reference.table("t", ROWS, DIM)
            rows = tf.nn.dropout(tf.nn.embedding_lookup(table, ids), rate=0.5, seed=4)
            loss = tf.reduce_mean(tf.square(rows * tf.get_variable("w", [DIM])))
            train = tf.train.AdagradOptimizer(0.1).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for _ in range(STEPS):
                    out.append(session.run([loss, train])[0])
        return out

    compared = losses()
    monkeypatch.setattr(input_check, "watched", lambda session, run, carry_out: carry_out)
    assert compared == losses()


def test_an_iterator_of_numbers_by_which_each_rank_finds_its_own_records(strategy, rank, size):
    with noticed(times=0):
        run(strategy, lambda: tf.data.Dataset.range(STEPS), ids=lambda i: [i * size + rank])
