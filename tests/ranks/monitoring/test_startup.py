"""Rank 0 says what a slow start is busy with, unless it is told to be quiet."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import startup
from tests.ranks import reference

pytestmark = pytest.mark.either_backend


@pytest.fixture
def impatient(monkeypatch):
    """Lets a start be slow after a moment."""
    for name, seconds in (("FIRST_LINE", 0.05), ("NEXT_LINE", 0.05), ("LOOK", 0.02)):
        monkeypatch.setattr(startup, name, seconds)


def waits(seconds):
    """Returns a tensor that is there after so many seconds."""

    def wait():
        time.sleep(seconds)
        return np.float32(0)

    return tf.ensure_shape(tf.numpy_function(wait, [], tf.float32, stateful=True), [])


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", ["print", "quiet"])
def test_a_slow_start_says_what_it_does_until_the_first_step(
    strategy, rank, plan, impatient, capsys
):
    with strategy.scope(plan=plan), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", 9, 2)
            end = time.monotonic() + 0.4
            while time.monotonic() < end:
                tf.constant(1.0)
                time.sleep(0.001)
        slow = tf.get_variable("slow", initializer=lambda: waits(0.4))
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, tf.constant([1, 2], tf.int64)))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss + slow)
        slow_step = [train, waits(0.4)]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(slow_step)
            first = capsys.readouterr()
            session.run(slow_step)
    assert "collective: " not in capsys.readouterr().err
    assert first.out == ""
    said = [line for line in first.err.splitlines() if line.endswith("s)")]
    if rank > 0 or plan == "quiet":
        assert said == []
        return
    whole = "\n".join(said)
    assert "collective: building the model: 1 table, 0 lookups and " in whole
    assert "collective: starting to run the graph, " in whole
    if strategy.world_size() > 1:
        assert "collective: the first training step" in whole


def test_a_quick_start_says_nothing(strategy, capsys):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", 9, 2)
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, tf.constant([1, 2], tf.int64)))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
    err = capsys.readouterr().err
    assert "building the model" not in err and "starting to run" not in err
