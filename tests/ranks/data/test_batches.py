"""Batches reach sessions and Estimators on all ranks: each sample once, an error on all."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint, data
from collective.coordination import barrier
from collective.data import Batch
from tests.ranks import reference

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3)]
B, STEPS, ROWS, RATE = 6, 4, 30, 0.5


def numbered(number):
    """Returns a batch of B samples with up to three ids each."""
    rng = np.random.default_rng([4, number])
    rows = [rng.integers(0, ROWS, rng.integers(0, 4)) for _ in range(B)]
    return Batch(
        ids={"user": rng.integers(0, ROWS, B).astype(np.uint64), "seen": rows},
        dense={"x": rng.normal(size=(B, 2)).astype(np.float32)},
        labels={"y": rng.normal(size=B).astype(np.float32)},
        meta=b"%d" % number,
    )


def batches():
    return (Batch.from_bytes(numbered(number).to_bytes()) for number in range(STEPS))


def model(strategy, element):
    """Returns a step of gradient descent, and a lookup of all rows."""
    with strategy.embedding_scope():
        table = reference.table("t", ROWS, 2)
    seen = tf.nn.safe_embedding_lookup_sparse(
        table, element["ids"]["seen"].to_sparse(), None, "sum"
    )
    user = tf.nn.embedding_lookup(table, element["ids"]["user"].values)
    score = tf.reduce_sum((seen + user) * element["dense"]["x"], axis=1)
    loss = tf.reduce_mean(tf.square(score - element["labels"]["y"]))
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(RATE).minimize(loss, global_step=step)
    return train, tf.nn.embedding_lookup(table, tf.range(ROWS))


def trained(numbers=range(STEPS), joined=1):
    """Trains in float64; `joined` batches are one step."""
    rows = reference.table_values(ROWS, 2).astype(np.float64)
    numbers = list(numbers)
    for first in range(0, len(numbers), joined):
        of_step = numbers[first : first + joined]
        gradient = np.zeros_like(rows)
        for number in of_step:
            batch = numbered(number)
            for sample in range(B):
                keys = [int(batch.ids["user"][sample][0]), *map(int, batch.ids["seen"][sample])]
                x = batch.dense["x"][sample].astype(np.float64)
                error = rows[keys].sum(0) @ x - batch.labels["y"][sample]
                for key in keys:
                    gradient[key] += 2 * error * x / (B * len(of_step))
        rows -= RATE * gradient
    return rows


def close(rows, expected):
    np.testing.assert_allclose(rows, expected, rtol=2e-5, atol=1e-6)


def rows_after(train, rows, **options):
    """Trains to the end of the data, and returns all rows."""
    with tf.train.MonitoredTrainingSession(**options) as session:
        while not session.should_stop():
            session.run(train)
            values = session.run_step_fn(lambda step_context: step_context.session.run(rows))
    return values


@pytest.mark.slow
@pytest.mark.parametrize("way", ["resumable", "shard"])
def test_samples_of_batches_are_dealt(strategy, size, way):
    """N ranks take the steps that one process takes with the whole batches."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        dataset = Batch.dataset(batches).unbatch()
        if way == "resumable":
            dataset = data.resumable(dataset, batch_size=B)
        else:
            dataset = strategy.shard(dataset).batch(B // size)
        element = tf.data.make_one_shot_iterator(dataset).get_next()
        assert element["ids"]["user"].dtype == tf.int64
        rows = rows_after(*model(strategy, element))
    close(rows, trained())


@pytest.mark.slow
def test_whole_batches_are_dealt_in_turn(strategy, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        dataset = strategy.shard(Batch.dataset(list(batches())))
        element = tf.data.make_one_shot_iterator(dataset).get_next()
        rows = rows_after(*model(strategy, element))
    close(rows, trained(range(STEPS // size * size), joined=size))


def test_batches_are_fed(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        places = numbered(0).placeholders()
        train, rows = model(strategy, places)
        with tf.train.MonitoredTrainingSession() as session:
            for number in range(STEPS // size):
                session.run(train, numbered(number * size + rank).feed(places))
            values = session.run(rows)
    close(values, trained(range(STEPS // size * size), joined=size))


@pytest.mark.long
def test_their_position_is_in_checkpoints(strategy, folder, size):
    """Each sample is used once, whenever the job stops."""
    for steps in (1, 3):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            samples = Batch.dataset(batches).unbatch()
            dataset = data.resumable(samples, batch_size=B)
            element = tf.data.make_one_shot_iterator(dataset).get_next()
            hooks = [tf.train.StopAtStepHook(num_steps=steps)]
            values = rows_after(*model(strategy, element), checkpoint_dir=folder, hooks=hooks)
    close(values, trained())


@pytest.mark.slow
def test_an_estimator_trains_on_them(strategy, size, folder):
    def model_fn(features, labels, mode):
        train, _ = model(strategy, features)
        return tf.estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=train)

    def input_fn():
        return Batch.dataset(batches).map(lambda element: (element, element["labels"]))

    with strategy.scope(plan="quiet"):
        estimator = strategy.estimator(model_fn, model_dir=folder)
        estimator.train(input_fn)
        rows = checkpoint.load(tf.train.latest_checkpoint(folder))["t"][np.arange(ROWS)]
    close(rows, trained(range(STEPS // size * size), joined=size))


@pytest.mark.slow
@pytest.mark.parametrize(
    "other, message",
    [
        (lambda: Batch(ids={"user": [1]}), "batch 2 isn't like the others"),
        (lambda: {"ids": {}}, "batch 2 is no Batch, but dict"),
    ],
)
def test_another_batch_ends_training_on_all_ranks(strategy, rank, size, other, message):
    def changing():
        yield from (numbered(0), numbered(1), other() if rank == size - 1 else numbered(2))

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        dataset = Batch.dataset(changing, like=numbered(0))
        element = tf.data.make_one_shot_iterator(dataset).get_next()
        train, _ = model(strategy, element)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(train)
            with pytest.raises((tf.errors.InvalidArgumentError, RankError)) as caught:
                session.run(train)
            texts = barrier.exchange(None, "errors", {"text": str(caught.value)})
            assert message in texts[size - 1]["text"]
