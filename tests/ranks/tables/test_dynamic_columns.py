"""categorical_column_with_embedding trains as the identity column does in plain TensorFlow."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import DynamicTable
from collective.tables.rows import initializers
from tests.ranks import reference

pytestmark = pytest.mark.double

V, D, B = 9, 3, 12


def normal():
    return tf.truncated_normal_initializer(stddev=0.5)


def drawn(name, keys=None):
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        keys = np.arange(V) if keys is None else np.asarray(keys, np.int64)
        return initializers.by_key(normal(), D, name)(keys.view(np.uint64), D).astype(np.float32)


def by_identity(key):
    return tf.feature_column.categorical_column_with_identity(key, V)


def values(name):
    return tf.constant_initializer(drawn(name))


def embedding(features, column, init):
    return tf.feature_column.input_layer(
        features,
        [
            tf.feature_column.embedding_column(
                column("a"), D, initializer=init("input_layer/a_embedding/embedding_weights")
            )
        ],
    )


def shared(features, column, init):
    columns = tf.feature_column.shared_embedding_columns(
        [column("a"), column("b")],
        D,
        initializer=init("input_layer/a_b_shared_embedding/embedding_weights"),
    )
    return tf.feature_column.input_layer(features, columns)


def weighted(features, column, init):
    with_weights = tf.feature_column.weighted_categorical_column(column("b"), "w")
    return tf.feature_column.input_layer(
        features,
        [
            tf.feature_column.embedding_column(
                with_weights,
                D,
                combiner="sqrtn",
                initializer=init("input_layer/b_weighted_by_w_embedding/embedding_weights"),
            )
        ],
    )


def dense_features(features, column, init):
    layer = tf.keras.layers.DenseFeatures(
        [
            tf.feature_column.embedding_column(
                column("b"), D, initializer=init("dense_features/b_embedding/embedding_weights")
            )
        ]
    )
    return layer(features)


def linear(features, column, init):
    return tf.feature_column.linear_model(features, [column("a"), column("b")])


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", [embedding, shared, weighted, dense_features, linear])
@pytest.mark.parametrize("inside", [True, False])
def test_trained_as_the_identity_column_in_plain_tensorflow(strategy, rank, size, way, inside):
    rng = np.random.default_rng(0)
    runs = [
        {
            "a": rng.integers(0, V, B),
            "b": rng.integers(0, V, (B, 2)),
            "w": rng.uniform(0.5, 2, (B, 2)).astype(np.float32),
        }
        for _ in range(4)
    ]

    def build(column, init, samples, embedding_scope):
        p = {
            "a": tf.placeholder(tf.int64, [samples]),
            "b": tf.placeholder(tf.int64, [samples, 2]),
            "w": tf.placeholder(tf.float32, [samples, 2]),
        }
        places = tf.constant([(i, j) for i in range(samples) for j in range(2)], tf.int64)
        features = {
            "a": p["a"],
            "b": tf.SparseTensor(places, tf.reshape(p["b"], [-1]), [samples, 2]),
            "w": tf.SparseTensor(places, tf.reshape(p["w"], [-1]), [samples, 2]),
        }
        with embedding_scope():
            layer = way(features, column, init)
        loss = tf.reduce_mean(tf.square(layer - 1.0))
        return {
            "train": tf.train.AdagradOptimizer(0.3).minimize(loss),
            "loss": loss,
            "layer": layer,
        }, p

    want = reference.plain(
        lambda s: build(by_identity, values, B, s), [(["train", "loss"], run) for run in runs]
    )
    got = reference.sharded(
        strategy,
        lambda s: build(
            collective.feature_column.categorical_column_with_embedding,
            lambda _: normal(),
            B // size,
            s if inside else contextlib.nullcontext,
        ),
        [
            (["train", "loss"], {k: reference.part(v, rank, size) for k, v in run.items()})
            for run in runs
        ]
        + [(["layer"], {k: reference.part(v, rank, size) for k, v in runs[0].items()})],
    )
    losses = np.array([step["loss"] for step in got[:-1]])
    if size == 1:
        np.testing.assert_allclose(losses, [step["loss"] for step in want], rtol=2e-5)
    whole = reference.plain(
        lambda s: build(by_identity, values, B, s),
        [(["train", "loss"], run) for run in runs] + [(["layer"], runs[0])],
    )[-1]["layer"]
    np.testing.assert_allclose(
        got[-1]["layer"], reference.part(whole, rank, size), rtol=2e-4, atol=2e-6
    )


def test_minus_one_is_a_key_and_an_empty_string_is_none(strategy):
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        column = collective.feature_column.categorical_column_with_embedding
        number = tf.feature_column.embedding_column(column("n", tf.int32), D, initializer=normal())
        word = tf.feature_column.embedding_column(column("s", tf.string), D, initializer=normal())
        layer = tf.feature_column.input_layer(
            {"n": tf.constant([-1, 5]), "s": tf.constant([["x", ""], ["", ""]])}, [number, word]
        )
        tables = tf.trainable_variables()
        assert len(tables) == 2 and all(isinstance(t, DynamicTable) for t in tables)
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(layer))
        x = tf.strings.to_hash_bucket_fast(["x"], 2**63 - 1)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            got = session.run(layer)
            np.testing.assert_array_equal(
                got[:, :D], drawn("input_layer/n_embedding/embedding_weights", [-1, 5])
            )
            np.testing.assert_array_equal(
                got[:, D:],
                [drawn("input_layer/s_embedding/embedding_weights", session.run(x))[0], [0] * D],
            )
            assert [session.run(t.total_count()) for t in tables] == [2, 1]


def test_parsed_and_refused(strategy):
    column = collective.feature_column.categorical_column_with_embedding
    spec = tf.feature_column.make_parse_example_spec(
        [
            tf.feature_column.embedding_column(column("n"), 2),
            tf.feature_column.embedding_column(column("s", tf.string), 2),
        ]
    )
    assert spec == {"n": tf.io.VarLenFeature(tf.int64), "s": tf.io.VarLenFeature(tf.string)}
    with pytest.raises(ValueError, match="'n'.*float32"):
        column("n", tf.float32)
    with pytest.raises(TypeError, match="'n'.*ev_option is a collective.TablePolicy"):
        column("n", dtype=tf.int64, partition_num=2, ev_option=object())
    with strategy.scope(), tf.Graph().as_default():
        with pytest.raises(ValueError, match="no number of buckets"):
            tf.feature_column.indicator_column(column("n"))
        with pytest.raises(ValueError, match="feature 'n' is string"):
            tf.feature_column.input_layer(
                {"n": tf.constant(["x"])}, [tf.feature_column.embedding_column(column("n"), 2)]
            )


def test_outside_of_scope_it_is_an_error():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="strategy.scope"):
        collective.get_embedding_variable("t", 3)
    column = collective.feature_column.categorical_column_with_embedding("n")
    with tf.Graph().as_default(), pytest.raises(ValueError, match="strategy.scope"):
        tf.feature_column.input_layer(
            {"n": tf.constant([1])}, [tf.feature_column.embedding_column(column, 2)]
        )
