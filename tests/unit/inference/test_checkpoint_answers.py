"""A checkpoint answers in one process, and its increments are taken while it does."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.training import monitored_session

import collective
from collective.checkpoint.files import chain
from collective.checkpoint.reading import opening

ROWS, DIM, RATE = 40, 3, 0.1
FIRST = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
RECEIVER = "serving_input_receiver_fn"


def build(strategy, ids):
    """Returns the sum of rows, and the loss that trains them."""
    with strategy.embedding_scope():
        table = tf.get_variable("s", [ROWS, DIM], initializer=tf.constant_initializer(FIRST))
    rows = tf.nn.embedding_lookup(table, ids)
    return tf.reduce_sum(rows, 1), tf.reduce_sum(rows**2)


def model_fn(features, labels, mode):
    score, loss = build(collective.CollectiveStrategy(), features["ids"])
    if mode == collective.estimator.ModeKeys.PREDICT:
        return collective.estimator.EstimatorSpec(mode, predictions={"score": score})
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(RATE).minimize(loss, global_step=step)
    return collective.estimator.EstimatorSpec(mode, loss=loss, train_op=train)


def receiver():
    ids = tf.placeholder(tf.int64, [None])
    return collective.estimator.export.ServingInputReceiver({"ids": ids}, {"ids": ids})


def signature():
    ids = tf.placeholder(tf.int64, [None])
    score, _ = build(collective.CollectiveStrategy(), ids)
    return tf.saved_model.predict_signature_def({"ids": ids}, {"score": score})


def trained(row, steps):
    """Returns rows after steps of Adagrad on the sum of squares of a row, by NumPy."""
    rows, seen = FIRST.astype(np.float64), 0.1
    for _ in range(steps):
        gradient = 2 * rows[row]
        seen = seen + gradient**2
        rows[row] -= RATE * gradient / np.sqrt(seen)
    return rows


@pytest.fixture
def training(tmp_path):
    """Yields what takes a step, in a session that saves each third as a whole checkpoint, and the
    others as increments.
    """
    folder, strategy = str(tmp_path / "job"), collective.CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        _, loss = build(strategy, tf.constant([3], tf.int64))
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdagradOptimizer(RATE).minimize(loss, global_step=step)
        # Another test of this process may have imported tf.train once more, by another path.
        with monitored_session.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=3, save_incremental_checkpoint_steps=1
        ) as session:
            yield folder, lambda: session.run(train)


def steps_in(folder):
    return chain.step_of(opening.open_checkpoint(folder).last)


MODELS = {
    "tables alone": {},
    "session": {"signature_def_fn": signature},
    "estimator": {"model_fn": model_fn, RECEIVER: receiver},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_the_states_of_a_job_that_trains_meanwhile(training, kind):
    folder, step = training
    step()
    with collective.InferenceContext(folder, interval=0.02, **MODELS[kind]) as context:
        for steps in (1, 2, 4, 5):
            while steps_in(folder) < steps:
                step()
            deadline = time.monotonic() + 30
            while context.version != steps:
                assert time.monotonic() < deadline, (context.version, steps, context.problems())
                time.sleep(0.01)
            rows = trained(3, steps)
            np.testing.assert_allclose(context.lookup(np.arange(ROWS)), rows, rtol=1e-5)
            if kind == "tables alone":
                with pytest.raises(ValueError, match="no function that predicts"):
                    context.predict({"ids": [3]})
            else:
                score = context.predict({"ids": [3, 5]})["score"]
                np.testing.assert_allclose(score, rows[[3, 5]].sum(1), rtol=1e-5)
        temporary = os.path.dirname(os.path.dirname(context._source._base))
        while len(os.listdir(temporary)) > 1:  # the one before is removed a little later
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not os.path.exists(temporary)


def test_a_state_by_its_name_stays(training):
    folder, step = training
    for _ in range(2):
        step()
    base = chain.prefix_of(folder)
    for name, steps in ((f"{base}.increment-1", 1), (base, 2), (folder, 2)):
        with collective.InferenceContext(name) as context:
            assert context.version == steps
            np.testing.assert_allclose(context.lookup([3])[0], trained(3, steps)[3], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*newest state can't be read now:RuntimeWarning")
def test_a_state_that_can_not_be_read_changes_nothing(training):
    folder, step = training
    step()
    with collective.InferenceContext(folder, interval=0.02) as context:
        before = context.lookup([3])
        prefix = chain.prefix_of(folder)
        os.rename(f"{prefix}.index", f"{prefix}.hidden")
        time.sleep(0.3)
        np.testing.assert_array_equal(context.lookup([3]), before)
        os.rename(f"{prefix}.hidden", f"{prefix}.index")
        step()
        deadline = time.monotonic() + 30
        while context.version != 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_arguments_that_do_not_fit(training):
    folder, step = training
    step()
    with pytest.raises(ValueError, match="needs serving_input_receiver_fn="):
        collective.InferenceContext(folder, model_fn=model_fn)
    with pytest.raises(ValueError, match="not both"):
        collective.InferenceContext(folder, signature_def_fn=signature, run_code=True)
    with pytest.raises(ValueError, match="has no saved code|no code"):
        collective.InferenceContext(folder, run_code=True)
