"""A table's slots and counters come out the same, whatever an enclosing variable_scope sets."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import TablePolicy, get_embedding_variable
from collective import estimator as tf_estimator
from collective.feature_column import categorical_column_with_embedding
from collective.train import AdagradDecayOptimizer
from tests.ranks import dynamic_tables, reference

V, D = 11, 3
IDS = np.array([1, 4, 4, 9, 0, 7])
OPTIMIZERS = {
    "adagrad": lambda: tf.train.AdagradOptimizer(0.2),
    "adam": lambda: tf.train.AdamOptimizer(0.1),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.2, l2_regularization_strength=0.1),
    "momentum": lambda: tf.train.MomentumOptimizer(0.2, 0.9),
    "centered": lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.9, centered=True),
}


def as_doubles(getter, *args, **kwargs):
    return tf.cast(getter(*args, **kwargs), tf.float64)


SETTINGS = {
    "one piece": {"partitioner": tf.fixed_size_partitioner(1)},
    "pieces": {"partitioner": tf.fixed_size_partitioner(2)},
    "regularizer": {"regularizer": lambda v: tf.reduce_sum(tf.square(v))},
    "caching device": {"caching_device": "/cpu:0"},
    "custom getter": {"custom_getter": as_doubles},
    "constraint": {"constraint": tf.nn.relu},
    "type": {"dtype": tf.float16},
    "initializer": {"initializer": tf.ones_initializer()},
    "reuse": {"reuse": tf.AUTO_REUSE},
    "reuse of all": {"reuse": True},
    "reference variables": {"use_resource": False},
}


def trained(make_table, optimizer, steps=3, **settings):
    """Trains one table, its optimizer inside a scope; returns the slots' names and the rows."""
    table = make_table()
    ids = tf.constant(IDS, tf.int64)
    rows = tf.nn.embedding_lookup(table, ids)
    loss = tf.reduce_mean(tf.square(rows - tf.ones([D])))
    with tf.variable_scope("top"), tf.variable_scope("dnn", **settings):
        train = OPTIMIZERS[optimizer]().minimize(loss)
    assert not tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)
    names = sorted(v.name for v in tf.global_variables() if v.name.startswith("top/"))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(steps):
            session.run(train)
        return names, session.run(rows)


def static():
    return reference.table("t", V, D)


def drawn():
    """Makes a variable of the rows that the keys of a dynamic table start from."""
    return tf.get_variable("t", initializer=dynamic_tables.drawn(np.arange(V)), use_resource=True)


def dynamic(policy=None):
    tf.set_random_seed(7)
    return get_embedding_variable(
        "t", D, initializer=dynamic_tables.normal(), ev_option=policy or TablePolicy()
    )


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_slots_are_those_without_the_scope(strategy, kind, optimizer, settings):
    with tf.Graph().as_default():
        names, expected = trained(static if kind == "static" else drawn, optimizer)
    with strategy.scope(), tf.Graph().as_default():

        def make():
            if kind == "dynamic":
                return dynamic()
            with strategy.embedding_scope():
                return static()

        got_names, rows = trained(make, optimizer, **SETTINGS[settings])
    assert got_names == names
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    # The others change the table itself, or refuse it, as in plain TensorFlow.
    [name for name in SETTINGS if name not in ("custom getter", "reuse of all", "constraint")],
)
def test_counters_of_a_table_that_is_made_inside(strategy, settings):
    """Its admission and its last use are noted next to it, under its name."""
    policy = TablePolicy(filter_freq=2, steps_to_live=100)
    step = {"steps": 4}
    with strategy.scope():
        results = []
        for inside in ({}, SETTINGS[settings]):
            with tf.Graph().as_default():
                tf.train.get_or_create_global_step()

                def make(inside=inside):
                    own = {k: v for k, v in inside.items() if k not in ("dtype", "regularizer")}
                    with tf.variable_scope("columns", **{**own, "initializer": None}):
                        return dynamic(policy)

                _, rows = trained(make, "adagrad", **step)
                results.append((sorted(v.name for v in tf.global_variables()), rows))
    (names, expected), (names_inside, rows) = results
    assert names_inside == names
    assert any(name.endswith("frequency:0") for name in names), names
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam", "Ftrl", "RMSProp", "SGD"])
def test_a_ready_made_estimator_trains_a_column_of_open_ended_keys(strategy, folder, optimizer):
    """Its model_fn opens a variable_scope with a partitioner, also around the optimizer."""
    column = categorical_column_with_embedding("user", dtype=tf.int64)
    ready = tf_estimator.DNNClassifier(
        [4],
        [tf.feature_column.embedding_column(column, D)],
        optimizer=optimizer,
        loss_reduction=tf.losses.Reduction.SUM_OVER_BATCH_SIZE,
    )

    def data():
        features = {"user": np.array([[5], [-7], [2**40], [5]])}
        return tf.data.Dataset.from_tensors((features, [[1], [0], [0], [1]])).repeat()

    estimator = strategy.estimator(ready.model_fn, os.path.join(folder, "model"))
    with strategy.scope():
        estimator.train(data, steps=2)
        first = estimator.evaluate(data, steps=1)["loss"]
        estimator.train(data, steps=60)
        last = estimator.evaluate(data, steps=1)["loss"]
    assert last < first


@pytest.mark.parametrize("pieces", [1, 2])
def test_slots_by_row_of_a_partitioned_layer_are_saved(strategy, folder, pieces):
    """A slot with one number for each row isn't of its variable's shape."""
    partitioner = tf.fixed_size_partitioner(pieces)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        with tf.variable_scope("mlp", partitioner=partitioner):
            layer = tf.layers.dense(tf.ones([2, 4]), 3)
        optimizer = AdagradDecayOptimizer(0.1, step, accumulator_decay_step=1)
        train = optimizer.minimize(tf.reduce_sum(layer), global_step=step)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            values = session.run(tf.global_variables())
            saver.save(session, f"{folder}/model")
            session.run(tf.global_variables_initializer())
            saver.restore(session, f"{folder}/model")
            for got, want in zip(session.run(tf.global_variables()), values):
                np.testing.assert_array_equal(got, want)
    reader = tf.train.load_checkpoint(f"{folder}/model")
    powers = reader.get_tensor("mlp/dense/kernel/AdagradDecay_1")
    np.testing.assert_array_equal(powers, np.ones([4, 1]))
