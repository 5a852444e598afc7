"""An InferenceContext answers with the rows and the numbers that the ranks have trained."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import get_embedding_variable
from collective.data import Batch
from tests.ranks import reference
from tests.ranks.exports import served, signature

pytestmark = [pytest.mark.either_backend, pytest.mark.backends("hb")]
KEYS = np.array([-(2**63), -5, 0, 7, 2**40, 2**63 - 1], np.int64)


def model():
    """Returns inputs and outputs, and the dynamic tables."""
    ids, keys = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
    words = tf.placeholder(tf.string, [None])
    static = reference.table("s", 11, 3)
    dynamic = get_embedding_variable("d", 2, initializer=tf.zeros_initializer())
    by_word = get_embedding_variable("w", 2, tf.string, initializer=tf.ones_initializer())
    rows = [tf.nn.embedding_lookup(t, x) for t, x in ((static, ids), (dynamic, keys))]
    score = tf.add_n([tf.reduce_sum(each, 1) for each in rows])
    score += tf.reduce_sum(tf.nn.embedding_lookup(by_word, words), 1)
    return {"ids": ids, "keys": keys, "words": words}, {"score": score}, dynamic


def test_an_export_of_all_ranks(strategy, folder):
    values = np.arange(2 * len(KEYS), dtype=np.float32).reshape(-1, 2)
    asked = {"ids": [10, 0, 3], "keys": [7, 8, -(2**63)], "words": ["to", "?", "be"]}
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            inputs, outputs, dynamic = model()
        loss = tf.reduce_sum(tf.nn.embedding_lookup(dynamic, KEYS) * -values)
        loss += 0.0 * tf.reduce_sum(outputs["score"])
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            first = {"ids": [0, 1], "keys": KEYS[:2], "words": ["to", "be"]}
            session.run(train, {inputs[name]: value for name, value in first.items()})
            here = session.run(
                outputs["score"], {inputs[name]: value for name, value in asked.items()}
            )
            prefix = tf.train.Saver().save(session, os.path.join(folder, "model"))
    path = strategy.export_saved_model(
        os.path.join(folder, "export"), prefix, signature(strategy, lambda: model()[:2])
    )
    with collective.InferenceContext(os.path.dirname(path)) as context:
        assert context.tables == ["d", "s", "w"] and str(context.version) in path
        ids = np.array([[10, 0], [3, 3]])
        np.testing.assert_array_equal(context.lookup(ids, "s"), reference.table_values(11, 3)[ids])
        np.testing.assert_array_equal(context.lookup(KEYS, table="d"), values)
        far = KEYS.view(np.uint64)
        np.testing.assert_array_equal(context.lookup(far, "d"), values)
        assert context.lookup([1, 8], "d").tolist() == [[0, 0], [0, 0]]
        assert context.lookup(["to", "?"], "w").tolist() == [[1, 1], [0, 0]]
        assert context.lookup([], "d").shape == (0, 2) and context.lookup(7, "d").shape == (2,)
        with pytest.raises(ValueError, match="table 's' has rows 0 … 10, and none of id 11"):
            context.lookup([1, 11], "s")
        with pytest.raises(ValueError, match="name a table: the model has d, s, w"):
            context.lookup([1])
        with pytest.raises(ValueError, match="there is no table 'x'"):
            context.lookup([1], "x")
        with pytest.raises(TypeError, match="ids of table 's' are integers, not float64"):
            context.lookup([1.0], "s")
        score = context.predict(asked)["score"]
    np.testing.assert_array_equal(score, served(path, asked)["score"])
    np.testing.assert_array_equal(score, here)


def test_a_batch_of_ragged_ids(strategy, folder):
    """By the names of a batch; its labels aren't needed."""

    def build():
        keys = tf.ragged.placeholder(tf.int64, 1, [])
        table = get_embedding_variable("d", 2, initializer=tf.ones_initializer())
        rows = tf.nn.embedding_lookup_sparse(table, keys.to_sparse(), None, combiner="sum")
        return keys, tf.reduce_sum(rows, 1)

    def serving():
        keys, score = build()
        info = tf.saved_model.build_tensor_info
        return tf.saved_model.build_signature_def(
            {"keys": info(keys)}, {"score": info(score)}, "predict"
        )

    batch = Batch(ids={"keys": [[1, 2], [3], [2, 2, 9]]}, labels={"click": np.zeros(3)})
    with strategy.scope(), tf.Graph().as_default():
        keys, score = build()
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(score))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {keys: tf.ragged.constant_value([[1, 2], [3]], np.int64)})
            prefix = tf.train.Saver().save(session, os.path.join(folder, "model"))
    path = strategy.export_saved_model(os.path.join(folder, "export"), prefix, serving)
    with collective.InferenceContext(path) as context:
        assert context.predict(batch)["score"].tolist() == [4.0, 2.0, 4.0]


def test_a_checkpoint_is_for_one_process(strategy, folder):
    with strategy.scope(), tf.Graph().as_default():
        reference.table("s", 11, 3)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            prefix = tf.train.Saver().save(session, os.path.join(folder, "model"))
    if strategy.world_size() > 1:
        with pytest.raises(ValueError, match="opened by one process, and this job has . ranks"):
            collective.InferenceContext(prefix)
    else:
        with collective.InferenceContext(prefix) as context:
            assert context.lookup(range(11)).tolist() == reference.table_values(11, 3).tolist()
