"""A table starts from the rows of another checkpoint: `TablePolicy.first_rows`, and by its column.

DeepRec's `CheckpointOption` becomes it.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
import collective.keras
from collective import CheckpointOption, EmbeddingVariableOption, FirstRows, TablePolicy

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

D, KEYS = 2, np.array([-4, 1, 7, 2**40])
RATE, START = 0.5, 0.1  # of Adagrad
STATIC = np.arange(5.0 * D).reshape(5, D)


def train(rows):
    """Updates rows by Adagrad, with a gradient of 1 for each element in each rank's batch."""
    return tf.train.AdagradOptimizer(RATE, START).minimize(tf.reduce_sum(rows))


def once(rows):
    """Returns rows after one update: the gradient is the mean over ranks, 1."""
    return rows - RATE / np.sqrt(START + 1)


@pytest.fixture
def source(strategy, folder):
    """Saves a dynamic table 'src/a' whose rows are 7 less one update, and one 's' [5, D]."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with tf.variable_scope("src"):
            table = collective.get_embedding_variable(
                "a", D, initializer=tf.constant_initializer(7)
            )
        with strategy.embedding_scope():
            tf.get_variable("s", [5, D], initializer=tf.constant_initializer(STATIC))
        update = train(tf.nn.embedding_lookup(table, KEYS))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(update)
            tf.train.Saver().save(session, f"{folder}/source/model")
    return f"{folder}/source"


def by_option(path):
    option = EmbeddingVariableOption(ckpt=CheckpointOption(f"{path}/model", "src/a"))
    return by_policy(path, option)


def by_policy(path, option=None):
    option = option or TablePolicy(first_rows=FirstRows(path, "src/a"))
    zeros = tf.zeros_initializer()
    table = collective.get_embedding_variable("a", D, initializer=zeros, ev_option=option)
    return lambda keys: tf.nn.embedding_lookup(table, keys)


def by_own_name(path):
    with tf.variable_scope("src"):
        return by_policy(path, EmbeddingVariableOption(ckpt=CheckpointOption(path)))


def by_column(path):
    option = TablePolicy(tf.zeros_initializer(), first_rows=FirstRows(path, "src/a"))
    make = collective.feature_column.categorical_column_with_embedding
    column = tf.feature_column.embedding_column(make("k", dtype=tf.int64, ev_option=option), D)

    def look_up(keys):
        with tf.variable_scope("columns", reuse=tf.AUTO_REUSE):
            return tf.feature_column.input_layer({"k": tf.constant(keys)}, [column])

    return look_up


@pytest.mark.parametrize(
    "way",
    [
        by_option,
        by_column,
        *(pytest.param(way, marks=pytest.mark.matrix) for way in (by_policy, by_own_name)),
    ],
)
def test_a_dynamic_table_starts_from_its_rows(strategy, folder, source, way):
    """Missing keys start by the initializer, slots fresh; a restore goes before."""
    with_new = np.append(KEYS, [5])
    first = np.vstack([np.full([len(KEYS), D], once(7.0)), np.zeros([1, D])])
    for number in range(2):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            look_up = way(source)
            rows, known = look_up(with_new), look_up(KEYS)
            update, saver = train(rows), tf.train.Saver()
            with tf.Session() as session:
                if number:
                    saver.restore(session, f"{folder}/own/model")
                else:
                    session.run(tf.global_variables_initializer())
                    np.testing.assert_allclose(session.run(known), first[:-1], rtol=1e-6)
                    session.run(update)
                    saver.save(session, f"{folder}/own/model")
                found = session.run(rows)
        np.testing.assert_allclose(found, once(first), rtol=1e-6)


def test_a_static_table_starts_from_its_rows(strategy, source):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope(policy=TablePolicy(first_rows=FirstRows(source))):
            table = tf.get_variable("s", [5, D], initializer=tf.zeros_initializer())
        rows = tf.nn.embedding_lookup(table, np.arange(5))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(rows), STATIC)
        assert "first_rows=the same of" in str(strategy.plan())
        with strategy.embedding_scope(policy=TablePolicy(first_rows=FirstRows(source, "none"))):
            with pytest.raises(ValueError, match="none is not found.*from which 't' is to start"):
                tf.get_variable("t", [5, D])


@pytest.mark.parametrize("placement", ["rows", "whole", "replicated"])
def test_static_tables_of_eager_code_start_from_them(strategy, source, placement):
    with strategy.scope():
        policy = TablePolicy(first_rows=FirstRows(source, "s"))
        with strategy.embedding_scope(policy=policy, placement=placement):
            layer = tf.keras.layers.Embedding(5, D)
        np.testing.assert_array_equal(layer(np.arange(5)), STATIC)
        with (
            strategy.embedding_scope(policy=policy, placement=placement),
            pytest.raises(ValueError, match="5"),
        ):
            tf.keras.layers.Embedding(6, D).build([None])


@pytest.mark.parametrize("placement", ["rows", "whole"])
def test_dynamic_tables_of_eager_code_start_from_them(strategy, size, source, folder, placement):
    """The optimizer's slots start fresh; also where rows go to a file."""
    in_file = {"storage": "dram_ssd", "storage_path": f"{folder}/rows", "storage_size": 1}
    for options in ({}, in_file):
        policy = TablePolicy(first_rows=FirstRows(source, "src/a"), **options)
        with strategy.scope(plan="quiet"):
            with strategy.embedding_scope(policy=policy, placement=placement):
                layer = collective.keras.layers.Embedding(D, name=f"layer{len(options)}")
            expected = np.repeat(once(7.0), D * len(KEYS)).reshape(-1, D)
            np.testing.assert_allclose(layer(KEYS), expected, rtol=1e-6)
            np.testing.assert_array_equal(layer(KEYS + 1), np.zeros([len(KEYS), D]))
            optimizer = tf.keras.optimizers.legacy.Adagrad(RATE, START, epsilon=0.0)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(KEYS))
            weights = layer.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            np.testing.assert_allclose(layer(KEYS), once(expected), rtol=1e-6)
