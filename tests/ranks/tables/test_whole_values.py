"""Initial values of whole tables, of which a rank keeps its rows, are made one after another."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.tables.rows import whole_values

pytestmark = pytest.mark.either_backend
ROWS, DIM, TABLES = 1 << 17, 32, 6
BYTES = ROWS * DIM * 4  # 16 MiB, of which the lock takes notice
THREADS = tf.ConfigProto(inter_op_parallelism_threads=4, use_per_session_threads=True)


def constant(shape, dtype=tf.float32, partition_info=None):
    """A constant to TensorFlow, and nothing that the library knows."""
    return tf.fill(shape, tf.placeholder_with_default(tf.constant(0.5, dtype), []))


def tables(strategy, init, count=TABLES, rows=ROWS):
    with strategy.embedding_scope():
        return [
            tf.get_variable(f"t{i}", [rows, DIM], initializer=init, use_resource=True)
            for i in range(count)
        ]


class Peak:
    """Measures the most memory that this process has inside, beyond that at the start."""

    def __enter__(self):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux forgets the most that there was.
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = self._read("VmHWM") - self._before

    def _read(self, name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


@pytest.mark.slow
def test_memory_has_one_whole_value(strategy, size):
    """Neither TensorFlow's threads nor its search for constants make several at once."""
    rows = 4 * ROWS
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        made = tables(strategy, constant, rows=rows)
        sums = [tf.reduce_sum(tf.nn.embedding_lookup(t, [0, rows - 1])) for t in made]
        with tf.Session(config=THREADS) as session:
            with Peak() as peak:
                session.run(tf.global_variables_initializer())
            assert session.run(sums) == [DIM] * TABLES
    shards = TABLES * 4 * BYTES // size
    assert peak.bytes < shards + 2.5 * 4 * BYTES


def test_one_at_a_time(strategy):
    """Also those that draw; each table is initialized by its own operation alone, too."""
    now, most, lock = [0], [0], threading.Lock()

    def begins():
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        return np.float32(1.0)

    def ends(x):
        with lock:
            now[0] -= 1
        return x

    def init(shape, dtype=tf.float32, partition_info=None):
        whole = tf.fill(shape, tf.ensure_shape(tf.numpy_function(begins, [], tf.float32), []))
        last = tf.numpy_function(ends, [whole[-1]], tf.float32)
        return tf.concat([whole[:-1], tf.ensure_shape(last, [DIM])[None]], 0)

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        made = tables(strategy, init)
        with tf.Session(config=THREADS) as session:
            session.run(tf.global_variables_initializer())
            assert (now, most) == ([0], [1])
            session.run(made[2].initializer)
            assert session.run(tf.report_uninitialized_variables()).size == 0


def test_a_value_that_needs_another_tables(strategy, rank, size):
    """It waits for no lock that it holds."""
    random = np.random.default_rng(0)

    def first(shape, dtype=tf.float32, partition_info=None):
        return tf.numpy_function(lambda: random.random(shape, np.float32), [], tf.float32)

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            a = tf.get_variable("a", [ROWS, DIM], initializer=first, use_resource=True)
            b = tf.get_variable("b", initializer=2 * a.initial_value + 1, use_resource=True)
        found = [tf.nn.embedding_lookup(t, [3, ROWS - 2]) for t in (a, b)]
        with tf.Session(config=THREADS) as session:
            session.run(b.initializer)
            session.run(a.initializer)
            assert all(x.shape == (2, DIM) for x in session.run(found))
            session.run(tf.global_variables_initializer())


def test_a_value_that_fails_gives_the_lock_back(strategy, size):
    wrong = [size == 1]  # With more ranks a start that fails ends the job.

    def value():
        if wrong[0]:
            raise ValueError("no rows today")
        return np.float32(2.0)

    def init(shape, dtype=tf.float32, partition_info=None):
        return tf.fill(shape, tf.ensure_shape(tf.numpy_function(value, [], tf.float32), []))

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        made = tables(strategy, init, 3)
        rows = [tf.nn.embedding_lookup(t, [0, 1]) for t in made]
        with tf.Session(config=THREADS) as session:
            if wrong[0]:
                with pytest.raises(tf.errors.OpError, match="no rows today"):
                    session.run(tf.global_variables_initializer())
                wrong[0] = False
            session.run(tf.global_variables_initializer())
            assert all(x.tolist() == [[2.0] * DIM] * 2 for x in session.run(rows))


def test_small_values_have_no_lock(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        tables(strategy, constant, rows=10)
        kinds = {op.type for op in graph.get_operations()}
        assert "MutexLock" not in kinds and whole_values.LEAST_BYTES == BYTES
