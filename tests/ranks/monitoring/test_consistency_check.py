"""scope(check=k) finds replicated variables that drifted apart, and names them on every rank."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.training import moving_averages

from collective import RankError, ReplicaError
from tests.ranks import reference
from tests.ranks.dynamic_tables import MORE_OPTIMIZERS
from tests.ranks.training import OPTIMIZERS

pytestmark = pytest.mark.either_backend

MORE = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.1),
}
ALL = {**OPTIMIZERS, **MORE, **MORE_OPTIMIZERS}


@contextlib.contextmanager
def training(strategy, rank, optimizer="adagrad", **options):
    """Builds a model with everything that is each rank's own, or could be taken for it.

    Yields (session, train, loss).
    """
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", 10, 3)
        w = tf.get_variable("w", [3, 2])  # another on each rank, until it is initialized
        drift = tf.get_variable("drift", [2], initializer=tf.zeros_initializer(), trainable=False)
        x = tf.gather(t, tf.constant([rank, 5, rank + 3])) * tf.random_uniform([3, 3])
        x = tf.layers.batch_normalization(tf.nn.dropout(x, rate=0.5), training=True)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w)))
        step = tf.train.get_or_create_global_step()
        running = tf.get_variable(
            "running", [], initializer=tf.zeros_initializer(), trainable=False
        )
        tf.add_to_collection(
            tf.GraphKeys.UPDATE_OPS,
            tf.group(moving_averages.assign_moving_average(running, loss, 0.9)),
        )
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            update = ALL[optimizer]().minimize(loss, global_step=step)
        with tf.control_dependencies([update]):
            averaged = tf.train.ExponentialMovingAverage(0.9, step).apply([w])
        own = tf.get_variable(
            "own",
            [],
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            initializer=tf.zeros_initializer(),
        )
        each = tf.get_variable(
            "each",
            [],
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            initializer=tf.zeros_initializer(),
        )
        mean = tf.metrics.mean(loss)[1]
        train = tf.group(
            averaged, tf.assign_add(own, rank + 1.0), tf.assign_add(each, rank + 1.0), mean
        )
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            yield session, train, drift


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "optimizer, local_steps", [*((name, 1) for name in ALL), ("adagrad", 2), ("adam", 2)]
)
def test_no_false_alarm(strategy, rank, size, optimizer, local_steps):
    with training(strategy, rank, optimizer, check=1, local_steps=local_steps) as (
        session,
        train,
        _,
    ):
        for _ in range(6):
            session.run(train)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "every, at, found, local_steps", [(1, 3, 3, 1), (2, 3, 4, 1), (2, 4, 4, 1), (2, 3, 4, 3)]
)
def test_a_variable_that_drifted_is_named_at_the_next_comparison(
    strategy, rank, size, every, at, found, local_steps
):
    if size == 1:
        return
    with training(strategy, rank, check=every, local_steps=local_steps) as (session, train, drift):
        assign, done = tf.assign(drift, [0.0, float(rank)]), 0
        with pytest.raises(ReplicaError) as raised:
            for number in range(1, 8):
                if number == at:
                    session.run(assign)
                session.run(train)
                done = number
    assert done == found - 1
    ranks = " | ".join(f"rank {r}" for r in range(size))
    assert f"After training run {found} of this session" in str(raised.value)
    assert f"any more: 'drift:0' ({ranks}). " in str(raised.value) and "LOCAL_VARIABLES" in str(
        raised.value
    )
    assert ("scope(check=1)" in str(raised.value)) == (every > 1)


def test_one_rank_that_differs_is_told_from_the_others_and_training_can_go_on(strategy, rank, size):
    """A session that goes on is compared again; made equal, it is well."""
    with training(strategy, rank, check=1) as (session, train, drift):
        other, equal = (
            tf.assign(drift, [0.0, float(rank == size - 1)]),
            tf.assign(drift, [7.0, 7.0]),
        )
        session.run(train)
        session.run(other)
        for _ in range(2 if size > 1 else 0):
            with pytest.raises(ReplicaError) as raised:
                session.run(train)
            alike = ", ".join(map(str, range(size - 1)))
            assert f"'drift:0' (rank {alike} | rank {size - 1})" in str(raised.value)
        session.run(equal)
        session.run(train)


def test_averages_of_layers_are_compared(strategy, rank, size):
    """Which layers declare to be each rank's own."""
    with training(strategy, rank, check=1) as (session, train, _):
        (average,) = (
            v for v in tf.global_variables() if v.op.name == "batch_normalization/moving_mean"
        )
        assert average.synchronization == tf.VariableSynchronization.ON_READ
        session.run(train)
        session.run(tf.assign(average, [0.0, 1.0, float(rank)]))
        with (
            pytest.raises(ReplicaError, match=average.name)
            if size > 1
            else contextlib.nullcontext()
        ):
            session.run(train)


def test_values_are_compared_by_their_bits(strategy, rank, size):
    """NaN is equal to itself; a zero's sign counts."""
    with training(strategy, rank, check=1) as (session, train, drift):
        session.run(tf.assign(drift, [np.nan, np.inf]))
        session.run(train)
        session.run(tf.assign(drift, [0.0, -0.0 if rank else 0.0]))
        with pytest.raises(ReplicaError) if size > 1 else contextlib.nullcontext():
            session.run(train)


def test_many_variables_are_counted(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(plan="quiet", check=True), tf.Graph().as_default():
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        train = tf.train.GradientDescentOptimizer(0.1).minimize(w * (rank + 1.0))
        many = tf.group(
            [
                tf.assign(
                    tf.get_variable(f"v{i}", [], initializer=tf.zeros_initializer()), float(rank)
                )
                for i in range(8)
            ]
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(many)
            with pytest.raises(
                ReplicaError, match=r"run 100 .*'v0:0' .*'v4:0' \([^)]*\) and 3 more\."
            ):
                for _ in range(101):
                    session.run(train)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["evaluation", "own", "second session"])
def test_other_runs_are_neither_counted_nor_compared(strategy, rank, size, kind):
    """Each rank may do what needs no peer as often as it likes; a session that only evaluates never
    compares.
    """
    with training(strategy, rank, check=2) as (session, train, drift):
        count = tf.reduce_sum(tf.cast(tf.gather(tf.global_variables()[0], [1, 2]), tf.float64))
        for _ in range(2):
            session.run(train)
            if kind == "evaluation":
                session.run(count)
            elif kind == "own":
                for _ in range(rank):
                    session.run(tf.report_uninitialized_variables())
            else:
                with tf.Session() as other:
                    other.run(tf.global_variables_initializer())
                    other.run(tf.assign(drift, [1.0, float(rank)]))
                    other.run(count)
            session.run(train)


@pytest.mark.parametrize("mine", [lambda rank: 2 if rank == 0 else False, lambda rank: rank + 1])
def test_ranks_that_are_given_different_options_are_told_at_the_first_run(
    strategy, rank, size, mine
):
    if size == 1:
        return
    with training(strategy, rank, check=mine(rank)) as (session, train, _):
        with pytest.raises(
            RankError, match=r"First difference: 'scope\(check=\d\)' is used by rank \d only"
        ):
            session.run(train)


@pytest.mark.parametrize("prefetch_keys", [False, True])
def test_in_a_monitored_session_whose_data_end(strategy, rank, size, prefetch_keys):
    """The run in which a rank's data end is none: nobody waits for a comparison."""
    with (
        strategy.scope(plan="quiet", check=1, prefetch_keys=prefetch_keys),
        tf.Graph().as_default(),
    ):
        data = tf.data.Dataset.from_tensors(np.array([rank, 5], np.int64)).repeat(3 + rank)
        with strategy.embedding_scope():
            t = reference.table("t", 10, 3)
        ids = tf.data.make_one_shot_iterator(data).get_next()
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids) * tf.get_variable("w", [3])))
        train = tf.train.AdamOptimizer(0.1).minimize(
            loss, global_step=tf.train.get_or_create_global_step()
        )
        steps = 0
        with tf.train.MonitoredTrainingSession("") as session:
            while not session.should_stop():
                session.run(train)
                steps += 1
    assert steps == 3


@pytest.mark.parametrize("value", [-1, 2.0, "often", None])
def test_the_option_is_a_truth_value_or_a_number(strategy, value):
    with pytest.raises(
        ValueError, match=r"scope\(check=…\) is True, False or a number of training runs, not"
    ):
        strategy.scope(check=value)
