"""Feature columns over static tables equal plain TensorFlow's: forward, and trained."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import Table
from tests.ranks import grouped, reference

COLUMN, V2 = tf.feature_column, tf2.feature_column
WORDS = ["red", "green", "blue", "black", "white"]
RNG = np.random.default_rng(8)
START = tf.constant_initializer(0.25)


def batch(rng):
    return {
        "id": rng.integers(0, 9, grouped.B),
        "other": rng.integers(0, 9, grouped.B),
        "many": grouped.padded(rng, 9, 4, least=0),
        "weight": rng.uniform(0.5, 2, (grouped.B, 4)).astype(np.float32),
        "word": rng.choice([*WORDS, "pink"], grouped.B),
        "x": rng.normal(size=(grouped.B, 1)).astype(np.float32),
        "labels": rng.normal(size=grouped.B).astype(np.float32),
    }


BATCHES = [batch(RNG) for _ in range(3)]


def features():
    """Returns (placeholders by name, features by name)."""
    made = {
        name: tf.placeholder(
            tf.as_dtype(value.dtype) if value.dtype.kind != "U" else tf.string,
            [None, *value.shape[1:]],
        )
        for name, value in BATCHES[0].items()
    }
    bags = grouped.sparse(made["many"])
    return made, {**made, "many": bags, "weight": grouped.sparse(made["many"], made["weight"])}


def identity(key, **kwargs):
    return COLUMN.categorical_column_with_identity(key, 9, **kwargs)


def embedded(column, dim=3, api=COLUMN, **kwargs):
    return api.embedding_column(column, dim, initializer=START, **kwargs)


def words(path):
    with open(path, "w") as file:
        file.write("\n".join(WORDS))
    return str(path)


COLUMNS = {
    "identity": lambda path: [embedded(identity("id"))],
    "v2": lambda path: [embedded(V2.categorical_column_with_identity("id", 9), api=V2)],
    "sum": lambda path: [embedded(identity("many"), combiner="sum")],
    "mean": lambda path: [embedded(identity("many"), combiner="mean")],
    "sqrtn": lambda path: [embedded(identity("many"), combiner="sqrtn")],
    "max_norm": lambda path: [embedded(identity("many"), max_norm=0.3)],
    "default": lambda path: [
        embedded(COLUMN.categorical_column_with_identity("id", 4, default_value=2))
    ],
    "weighted": lambda path: [
        embedded(COLUMN.weighted_categorical_column(identity("many"), "weight"), combiner="mean")
    ],
    "hashed": lambda path: [embedded(COLUMN.categorical_column_with_hash_bucket("word", 7))],
    "vocabulary_list": lambda path: [
        embedded(COLUMN.categorical_column_with_vocabulary_list("word", WORDS, num_oov_buckets=2))
    ],
    "vocabulary_file": lambda path: [
        embedded(COLUMN.categorical_column_with_vocabulary_file("word", words(path), 5))
    ],
    "crossed": lambda path: [embedded(COLUMN.crossed_column([identity("id"), "word"], 20))],
    "indicator": lambda path: [COLUMN.indicator_column(identity("many")), embedded(identity("id"))],
    "bucketized": lambda path: [
        embedded(COLUMN.bucketized_column(COLUMN.numeric_column("x"), [-0.5, 0.0, 0.5])),
        COLUMN.numeric_column("x"),
    ],
    "several": lambda path: [
        embedded(identity("id"), 2),
        embedded(identity("many"), 4),
        COLUMN.numeric_column("x"),
        embedded(COLUMN.categorical_column_with_hash_bucket("word", 7), 1),
    ],
    "not_trained": lambda path: [
        embedded(identity("id")),
        embedded(identity("other"), trainable=False),
    ],
}


def trained(strategy, rank, size, wide):
    """Asserts that three steps of a model over `wide(features)` end with the same variables."""

    def build(embedding_scope):
        feeds, found = features()
        with embedding_scope():
            x = wide(found)
        out = tf.layers.dense(x, 1, kernel_initializer=tf.ones_initializer())[:, 0]
        train = tf.train.AdagradOptimizer(0.3).minimize(
            tf.reduce_mean(tf.square(out - feeds["labels"]))
        )
        with tf.control_dependencies([tf.tables_initializer()]):
            ready = tf.no_op()
        kept = {v.op.name: v for v in tf.global_variables() if "Adagrad" not in v.name}
        return {"train": train, "ready": ready, "x": x, **kept}, feeds

    names = []

    def built(embedding_scope):
        fetches, feeds = build(embedding_scope)
        names[:] = [name for name in fetches if name not in ("train", "ready", "x")]
        return fetches, feeds

    with tf.Graph().as_default():
        built(lambda: tf.name_scope(None))
    runs = [(["ready"], {}), (["x"], BATCHES[0]), *((["train"], b) for b in BATCHES), (names, {})]
    want, got = grouped.both(strategy, rank, size, built, runs)
    np.testing.assert_allclose(
        got[1]["x"], reference.part(want[1]["x"], rank, size), rtol=1e-5, atol=1e-6
    )
    grouped.same(got[-1], want[-1])
    assert names


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "kind, layer",
    [
        (kind, layer)
        for kind in COLUMNS
        for layer in ("input_layer", "DenseFeatures", "tf2.DenseFeatures")
        if (kind, layer) != ("v2", "input_layer")
        and (layer != "tf2.DenseFeatures" or kind in ("v2", "several", "not_trained"))
    ],
)
def test_columns(strategy, rank, size, kind, layer, tmp_path):
    def wide(found):
        columns = COLUMNS[kind](tmp_path / "words")
        if layer == "input_layer":
            return COLUMN.input_layer(found, columns)
        if layer == "tf2.DenseFeatures":
            return tf2.keras.layers.DenseFeatures(columns)(found)
        return tf.keras.layers.DenseFeatures(columns)(found)

    trained(strategy, rank, size, wide)


@pytest.mark.parametrize("keras", [tf.keras, tf2.keras], ids=["tf", "tf2"])
def test_weights_of_a_layer_are_tables(strategy, keras):
    """The layer of TensorFlow's second version makes them in a way of its own."""
    with strategy.scope(), tf.Graph().as_default():
        found = features()[1]
        with strategy.embedding_scope():
            keras.layers.DenseFeatures([embedded(identity("id"), 2), embedded(identity("other"))])(
                found
            )
        assert [type(v) for v in tf.global_variables()] == [Table, Table]


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", [1, 2])
def test_shared_columns(strategy, rank, size, version):
    """One table for two columns."""

    def wide(found):
        if version == 1:
            return COLUMN.input_layer(
                found,
                COLUMN.shared_embedding_columns(
                    [identity("id"), identity("many")], 3, initializer=START
                ),
            )
        shared = V2.shared_embeddings(
            [V2.categorical_column_with_identity(name, 9) for name in ("id", "many")],
            3,
            initializer=START,
        )
        return tf.keras.layers.DenseFeatures(shared)(found)

    trained(strategy, rank, size, wide)


@pytest.mark.matrix
def test_linear_models(strategy, rank, size):
    """Their weights are tables of dimension 1 in embedding_scope(), biases are replicated."""

    def wide(found):
        columns = [
            identity("id"),
            COLUMN.weighted_categorical_column(identity("many"), "weight"),
            COLUMN.crossed_column(["word", identity("other")], 30),
            COLUMN.numeric_column("x"),
        ]
        return COLUMN.linear_model(found, columns, sparse_combiner="mean")

    trained(strategy, rank, size, wide)


def test_sequence_columns(strategy, rank, size):
    sequence = tf.feature_column.sequence_categorical_column_with_identity

    def wide(found):
        x, lengths = tf.keras.experimental.SequenceFeatures([embedded(sequence("many", 9))])(found)
        return tf.reduce_sum(x, 1) / tf.maximum(tf.cast(lengths, tf.float32), 1)[:, None]

    trained(strategy, rank, size, wide)
