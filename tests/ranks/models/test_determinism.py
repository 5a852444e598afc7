"""scope(deterministic=True) gives the same bits again.

Data come in one order, and TensorFlow is afterwards as it was.
"""

import contextlib
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import config

from collective import RankError
from collective.ops.communication import collectives, gate
from collective.tensorflow_internals.keras import backend
from tests.jobs.deterministic_training import bits
from tests.ranks import grouped, reference


@pytest.mark.matrix
def test_training_twice_gives_the_same_bits(strategy):
    assert bits(strategy, deterministic=True) == bits(strategy, deterministic=True)


def test_numbers_are_those_of_plain_tensorflow(strategy, rank, size):
    """Sums in the order of the ranks are sums, and so is their gradient's gradient (a penalty on a
    gradient).
    """

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 9, 3)
        ids = tf.placeholder(tf.int64, [None])
        w, v = (
            tf.get_variable(name, initializer=reference.table_values(3, 2, seed))
            for name, seed in (("w", 1), ("v", 2))
        )
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.nn.embedding_lookup(t, ids), w * v)))
        penalty = sum(tf.reduce_sum(tf.square(g)) for g in tf.gradients(loss, [w, v]))
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss + penalty)
        return {
            "train": train,
            "w": w.read_value(),
            "v": v.read_value(),
            **grouped.rows_of({"t": t}),
        }, {"ids": ids}

    ids = np.random.default_rng(0).integers(0, 9, grouped.B)
    with strategy.scope(deterministic=True):
        want, got = grouped.both(
            strategy, rank, size, build, [(["train"], {"ids": ids})] * 3 + [(["w", "v", "t"], {})]
        )
    grouped.same(got[-1], want[-1])


def test_sums_are_formed_in_the_order_of_the_ranks(strategy, rank, size):
    """Of 1e8, 1 and -1e8 in float32 the order matters; next to others they are the same. 0 with all
    in their places.
    """
    values = np.array([1e8, 1.0, -1e8, 1.0], np.float32)
    with strategy.scope(deterministic=True), tf.Graph().as_default() as graph:
        with strategy.embedding_scope():
            tf.get_variable("t", [4, 1])
        zero = gate.gates_of(graph).of_collective([]).zero
        long, short = tf.fill([7], values[rank]), tf.fill([1, 2], values[rank])
        alone = collectives.allreduce_sum([long], collectives.unique_name("alone"), zero)
        together = collectives.allreduce_sum(
            [short, tf.zeros([5]), long], collectives.unique_name("together"), zero
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            alone, together = session.run([alone, together])
    want = np.float32(0)
    for value in values[:size]:
        want = np.float32(want + value)
    for got, shape in ((alone[0], [7]), (together[0], [1, 2]), (together[2], [7])):
        np.testing.assert_array_equal(got, np.full(shape, want))


def test_data_come_in_one_order(strategy):
    """Though they are told that they needn't, and the first take the longest."""

    def slow(i):
        time.sleep(0.02 * (4 - i % 4))
        return i

    with strategy.scope(deterministic=True), tf.Graph().as_default():
        tf.set_random_seed(1)  # a one-shot iterator takes one
        data = tf.data.Dataset.range(12).map(
            lambda i: tf.numpy_function(slow, [i], tf.int64, stateful=False),
            num_parallel_calls=4,
            deterministic=False,
        )
        following = tf.data.make_one_shot_iterator(data).get_next()
        with tf.Session() as session:
            assert [session.run(following) for _ in range(12)] == list(range(12))


def test_random_numbers_need_a_seed(strategy):
    with strategy.scope(deterministic=True), tf.Graph().as_default():
        with pytest.raises(RuntimeError, match="require a seed"):
            tf.nn.dropout(tf.ones([3]), rate=0.5)
        with pytest.raises(RuntimeError, match="require a seed"):
            tf.data.Dataset.range(4).shuffle(2)
        with strategy.embedding_scope():
            tf.get_variable("t", [4, 2])  # whose rows have seeds of their own
            tf.get_variable("d", [None, 2])


def dense_layers():
    """Builds layers of all kinds: their kernels, and a random number that TensorFlow seeds."""
    x = tf.ones([2, 4])
    tf.layers.dense(x, 3, name="dense")
    tf2.keras.layers.Dense(3, "relu", name="keras")(x)
    tf2.keras.layers.Dense(4, kernel_initializer="orthogonal", name="orthogonal")(x)
    tf.get_variable("given", [4, 3], initializer=tf2.initializers.GlorotNormal(seed=3))
    tf.get_variable("own", [4, 3])
    kernels = [v for v in tf.global_variables() if v.shape.rank == 2]
    return {v.op.name: v.initial_value for v in kernels}, tf.random.uniform([3])


def first_values(scope):
    """Returns the layers' initial values on this rank, what they start from, and random numbers."""
    with scope, tf.Graph().as_default():
        tf.set_random_seed(5)
        own, drawn = dense_layers()
        variables = {v.op.name: v for v in tf.global_variables() if v.op.name in own}
        with tf.Session() as session:
            own, drawn = session.run([own, drawn])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return own, session.run(variables), drawn


@pytest.mark.ranks(1, 3)
def test_first_values_of_layers_come_from_the_seed(strategy, rank):
    """Keras, and tf.layers with it, draws them by Python's random numbers otherwise.

    They are the same on every rank before ranks share anything, so they don't depend on N.
    """
    random.seed(rank)
    own, start, _ = first_values(strategy.scope(deterministic=True))
    random.seed(rank + 7)
    again, _, _ = first_values(strategy.scope(deterministic=True))
    for other in grouped.everyone(own):
        grouped.same(other, own, rtol=0, atol=0)
    grouped.same(again, own, rtol=0, atol=0)
    grouped.same(start, own, rtol=0, atol=0)
    different = {values.tobytes() for values in own.values()}
    assert len(different) == len(own) == 5


def test_seeds_of_layers_take_none_of_tensorflows(strategy):
    """Whatever TensorFlow seeds, and an initializer with a seed, starts as in plain TensorFlow."""
    plain, _, drawn = first_values(contextlib.nullcontext())
    own, _, drawn_inside = first_values(strategy.scope(deterministic=True))
    np.testing.assert_array_equal(drawn_inside, drawn)
    for name in ("own", "given"):
        np.testing.assert_array_equal(own[name], plain[name])


def test_layers_without_a_seed_are_refused(strategy):
    with strategy.scope(deterministic=True), tf.Graph().as_default():
        with pytest.raises(RuntimeError, match=r"'towers/dense/kernel.*tf.set_random_seed"):
            with tf.variable_scope("towers"):
                tf.layers.dense(tf.ones([2, 4]), 3)
    with strategy.scope(), tf.Graph().as_default():
        tf.layers.dense(tf.ones([2, 4]), 3)


def test_a_seed_of_keras_is_kept(strategy, monkeypatch):
    """`tf.keras.utils.set_random_seed` gives Keras a generator."""
    monkeypatch.setattr(backend, "_SEED_GENERATOR", SimpleNamespace(generator=random.Random(3)))
    with strategy.scope(deterministic=True):
        assert backend.RandomGenerator(rng_type="stateless").make_seed_for_stateless_op() == [
            random.Random(3).randint(1, 10**9),
            0,
        ]


def test_tensorflow_is_left_as_it_was(strategy):
    assert not config.is_op_determinism_enabled()
    with strategy.scope():
        assert not config.is_op_determinism_enabled()
        with strategy.scope(deterministic=True), strategy.scope():
            assert config.is_op_determinism_enabled()
            with strategy.scope(deterministic=False):
                assert not config.is_op_determinism_enabled()
            assert config.is_op_determinism_enabled()
        assert not config.is_op_determinism_enabled()
    config.enable_op_determinism()
    try:
        with strategy.scope(deterministic=True):
            pass
        assert config.is_op_determinism_enabled()
    finally:
        config.disable_op_determinism()


def test_one_rank_that_is_told_alone_is_an_error_on_all(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(deterministic=rank == 0), tf.Graph().as_default():
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        train = tf.train.GradientDescentOptimizer(0.1).minimize(w * 2.0)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(RankError, match="The ranks do not run the same"):
                session.run(train)
