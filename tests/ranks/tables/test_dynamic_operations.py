"""Compiled operations find, draw and settle the rows of dynamic tables: a step runs no Python."""

import gc

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.ops import native_library
from collective.ops.rows import memory
from tests.ranks.dynamic_tables import EXTREME, D, drawn
from tests.ranks.grouped import counted

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1)]


@pytest.mark.grouped
@pytest.mark.parametrize(
    "optimizer",
    [tf.train.AdagradOptimizer(0.1), tf.train.AdamOptimizer(0.1)],
    ids=["adagrad", "adam"],
)
def test_a_step_runs_no_python(strategy, optimizer):
    """One operation finds the rows of all tables of a group."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tables = [collective.get_embedding_variable(name, D) for name in "tuv"]
        ids = tf.placeholder(tf.int64, [None])
        losses = [tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2) for table in tables]
        train = optimizer.minimize(tf.add_n(losses))
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(train, {ids: [1, 2]})
            run = session._tf_sess()
            _, counts = counted(run, train, {ids: [2, *range(10, 50)]})
    assert counts["CollectiveFindRows"] == 1
    assert counts["CollectiveSettleSlots"] == 3
    assert not [kind for kind in counts if "PyFunc" in kind], counts


@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16], ids=lambda t: t.name)
def test_tables_of_other_types_start_from_the_same_numbers(strategy, dtype):
    keys = EXTREME
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tf.set_random_seed(7)
        table = collective.get_embedding_variable(
            "t", D, value_dtype=dtype, initializer=tf.truncated_normal_initializer(stddev=0.5)
        )
        rows = tf.nn.embedding_lookup(table, tf.constant(keys))
        train = tf.train.GradientDescentOptimizer(0.0).minimize(
            tf.reduce_sum(tf.cast(rows, tf.float32))
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            found = session.run(rows)
    # What is drawn as float32 differs from what is drawn as this type by its rounding.
    np.testing.assert_allclose(found.astype(np.float64), drawn(keys), rtol=2.0**-8, atol=1e-6)


def test_first_values_that_python_draws(strategy):
    """A normal distribution without bounds needs NumPy's logarithm: drawn when new keys come."""
    init = tf.random_normal_initializer()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tf.set_random_seed(7)
        table = collective.get_embedding_variable("t", D, initializer=init)
        ids = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(table, ids)
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(rows))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for keys in (EXTREME[:5], EXTREME):
                session.run(train, {ids: keys})
                found = session.run(rows, {ids: keys})
                np.testing.assert_array_equal(found, drawn(keys, init=init))


def test_a_table_that_is_full_fails_the_run_and_names_itself(strategy, size, monkeypatch):
    if size > 1:  # One rank's share is known only there: tests/jobs/test_faults.py.
        return
    monkeypatch.setattr(memory, "rows_that_fit", lambda *_: 3)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        full = collective.get_embedding_variable("mine", D, initializer=1.0)
        monkeypatch.undo()
        other = collective.get_embedding_variable("other", D, initializer=2.0)
        ids = tf.placeholder(tf.int64, [None])
        rows = [tf.nn.embedding_lookup(table, ids) for table in (full, other)]
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(sum(rows)))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            words = r"dynamic table 'mine': it is full: 3 rows of 3\. Train on more ranks"
            with pytest.raises(tf.errors.ResourceExhaustedError, match=words):
                session.run(train, {ids: np.arange(9)})
            one, _ = session.run(rows, {ids: np.arange(5)})
            np.testing.assert_array_equal(one, [[1] * D] * 3 + [[0] * D] * 2)
            assert full.local_count(session) == 3


def test_memory_that_is_gone_is_an_error(strategy):
    """A graph's number that leads to no memory, and one that leads to another's, end the run."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        one, other = (collective.get_embedding_variable(name, D) for name in "ab")
        find = native_library.library().collective_find_rows
        keys, insert = [tf.constant([1], tf.int64)], tf.constant(True)
        wrong = [
            find([tf.constant(2**60, tf.int64)], [one.handle], keys, insert, [])[0],
            find([one.number], [other.handle], keys, insert, [])[0],
        ]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for rows in wrong:
                with pytest.raises(tf.errors.UnknownError, match="dynamic table is gone"):
                    session.run(rows)
            assert one.local_count(session) == other.local_count(session) == 0
    gc.collect()
