"""Streams reach sessions and Estimators on all ranks: each sample once, whatever N is."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import RankError, checkpoint, data
from collective import trainer as trainer_units
from collective.coordination import barrier
from collective.data.streams.loader import LoaderServer
from collective.job import streams
from tests.ranks.data.test_batches import (
    ROWS,
    STEPS,
    B,
    close,
    model,
    numbered,
    rows_after,
    trained,
)

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3)]


def batches(stream, number_of_streams, first):
    """Has the even batches in stream 0, the odd ones in stream 1."""
    for number in range(first, STEPS // 2):
        yield numbered(number_of_streams * number + stream)


@pytest.fixture
def loaders(rank, monkeypatch):
    """Returns the addresses of two loaders, which rank 0 runs."""
    monkeypatch.setenv(streams.KEY, "a key of a test")
    with contextlib.ExitStack() as stack:
        key = streams.stream_key({streams.KEY: "a key of a test"})
        servers = [
            stack.enter_context(LoaderServer({"data": batches}, "127.0.0.1:0", key, stream, 2))
            for stream in range(2 if rank == 0 else 0)
        ]
        own = [server.address for server in servers]
        yield barrier.exchange(None, "loaders", {"addresses": own})[0]["addresses"]
        barrier.exchange(None, "the end of loaders", {})


@pytest.mark.slow
def test_their_position_is_in_checkpoints(strategy, folder, loaders):
    for steps in (1, 3):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            element = tf.data.make_one_shot_iterator(data.stream(loaders)).get_next()
            hooks = [tf.train.StopAtStepHook(num_steps=steps)]
            values = rows_after(*model(strategy, element), checkpoint_dir=folder, hooks=hooks)
    close(values, trained())


@pytest.mark.long
def test_a_trainer_trains_on_them(strategy, folder, loaders):
    """Batches of a stream are the global batches; validation begins at its start each time."""

    def model_fn(features, labels, mode):
        train, _ = model(strategy, features)
        loss = tf.reduce_mean(labels["y"])
        metric = tf.metrics.mean(labels["y"])
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=train, eval_metric_ops={"mean": metric}
        )

    def stream(**options):
        dataset = data.stream(loaders, batch_size=B, **options)
        return dataset.map(lambda element: (element, element["labels"]))

    trainer = collective.Trainer(model_fn, model_dir=folder, global_batch_size=B)
    trainer.fit(stream, max_length=trainer_units.Batch(2))
    trainer.fit(stream, stream, max_length=trainer_units.Batch(STEPS))
    rows = checkpoint.load(tf.train.latest_checkpoint(folder))["t"][np.arange(ROWS)]
    close(rows, trained())
    expected = np.mean([numbered(number).labels["y"] for number in range(STEPS)])
    np.testing.assert_allclose(trainer.evaluate(stream)["mean"], expected, rtol=1e-5)


@pytest.mark.slow
def test_other_loaders_are_refused(strategy, folder, loaders):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        element = tf.data.make_one_shot_iterator(data.stream(loaders)).get_next()
        hooks = [tf.train.StopAtStepHook(num_steps=1)]
        rows_after(*model(strategy, element), checkpoint_dir=folder, hooks=hooks)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        dataset = data.stream(loaders[:1], like=numbered(0))
        element = tf.data.make_one_shot_iterator(dataset).get_next()
        with pytest.raises((tf.errors.InvalidArgumentError, RankError), match="digest 2.*digest 1"):
            rows_after(*model(strategy, element), checkpoint_dir=folder)


@pytest.mark.slow
def test_a_dead_loader_ends_the_job_by_its_address(strategy, loaders):
    gone = [loaders[0], "127.0.0.1:1"]
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        dataset = data.stream(gone, like=numbered(0), timeout=0.5)
        element = tf.data.make_one_shot_iterator(dataset).get_next()
        train, _ = model(strategy, element)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises((tf.errors.OpError, RankError)) as caught:
                for _ in range(2):
                    session.run(train)
            texts = barrier.exchange(None, "errors", {"text": str(caught.value)})
            assert any("127.0.0.1:1" in each["text"] for each in texts)
