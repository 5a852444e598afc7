"""A model has more than its folder's checkpoint: the error says what is new and what to do."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.checkpoint import WarmStart

RATE = 0.5


def model(strategy, tables, dynamic=(), dense=()):
    """Trains rows 1 and 2 of each table by Adagrad, from ones; returns what a test looks at."""
    ones = tf.ones_initializer()
    with strategy.embedding_scope():
        parts = [tf.get_variable(name, [4, 2], initializer=ones) for name in tables]
    parts += [collective.get_embedding_variable(name, 2, initializer=ones) for name in dynamic]
    rows = [tf.nn.embedding_lookup(part, [1, 2]) for part in parts]
    kernels = [tf.get_variable(name, [2], initializer=ones) for name in dense]
    loss = tf.add_n([tf.reduce_sum(x) for x in (*rows, *kernels)])
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(RATE, 1.0).minimize(loss, step)
    values = dict(zip((*tables, *dynamic), rows)) | dict(zip(dense, kernels))
    return values, train


def train(strategy, folder, tables, dynamic=(), dense=(), steps=1, **scope):
    """Trains in a monitored session of the folder; returns the values before and after."""
    with strategy.scope(**scope), tf.Graph().as_default():
        values, train = model(strategy, tables, dynamic, dense)
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_summaries_steps=None, log_step_count_steps=None
        ) as session:
            before = session.run(values)
            for _ in range(steps):
                session.run(train)
            return before, session.run(values)


def after(steps):
    """Computes a value after so many steps of Adagrad with the gradient 1, from 1."""
    return 1 - RATE * sum(1 / np.sqrt(1 + i) for i in range(1, steps + 1))


# (tables, dynamic tables, dense variables) of the new model; what the error says of them
CASES = {
    "a table": ((["user", "item"], [], ["bias"]), "no table 'item'"),
    "tables": ((["user", "item", "shop"], [], ["bias"]), "no tables 'item', 'shop'"),
    "a dynamic table": ((["user"], ["query"], ["bias"]), "no table 'query'"),
    "all kinds": (
        (["user", "item"], ["query"], ["bias", "gain"]),
        "no tables 'item', 'query' (its tables: user); it has no variable 'gain'",
    ),
    "variables": ((["user"], [], ["bias", "gain", "other"]), "no variables 'gain', 'other'"),
}


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_a_model_with_more_than_its_checkpoint(strategy, folder, case):
    """What the error names works: old values and slots go on, new ones start fresh."""
    (tables, dynamic, dense), words = CASES[case]
    train(strategy, f"{folder}/old", ["user"], [], ["bias"], 2)
    with pytest.raises(tf.errors.NotFoundError) as raised:
        train(strategy, f"{folder}/old", tables, dynamic, dense)
    said = str(raised.value)
    assert words in said and "slot" not in said.replace("slots=True", ""), said
    way = f"strategy.scope(warm_start=collective.checkpoint.WarmStart('{folder}/old/model.ckpt-2'"
    assert way in said and "Adagrad" not in said, said
    start = WarmStart(f"{folder}/old/model.ckpt-2", slots=True)
    before, trained = train(strategy, f"{folder}/new", tables, dynamic, dense, warm_start=start)
    for name in before:
        count = 2 if name in ("user", "bias") else 0
        if name not in dynamic:  # Keys that came in no training yet have no rows.
            np.testing.assert_allclose(before[name], np.full_like(before[name], after(count)), 1e-6)
        np.testing.assert_allclose(
            trained[name], np.full_like(before[name], after(count + 1)), 1e-6
        )
    train(strategy, f"{folder}/new", tables, dynamic, dense)  # it goes on in its own folder


@pytest.mark.slow
def test_another_optimizer_is_no_new_feature(strategy, folder):
    """And a checkpoint that has nothing of the model is no start for it."""
    train(strategy, folder, ["user"], [], ["bias"])
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("user", [4, 2])
        bias = tf.get_variable("bias", [2])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, [1])) + tf.reduce_sum(bias)
        tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        with tf.Session() as session, pytest.raises(tf.errors.NotFoundError) as raised:
            tf.train.Saver().restore(session, f"{folder}/model.ckpt-1")
    said = str(raised.value)
    assert "missing_slots='fresh'" in said and "warm_start" not in said, said
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            tf.get_variable("else", [4, 2])
        with tf.Session() as session, pytest.raises(tf.errors.NotFoundError) as raised:
            tf.train.Saver().restore(session, f"{folder}/model.ckpt-1")
    assert "no table 'else' (its tables: user)" in str(raised.value)
    assert "warm_start" not in str(raised.value)
