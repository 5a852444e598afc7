"""Functions of tf.contrib compute what they computed in TensorFlow 1."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.compat.names.contrib import CONTRIB

NAMES = {name.theirs: name for name in CONTRIB}
LAYERS, INNER = "tf.contrib.layers", "tf.contrib.layers.python.layers"
RNG = np.random.default_rng(5)
X, W = RNG.normal(size=(3, 4)).astype(np.float32), RNG.normal(size=(4, 2)).astype(np.float32)
ROWS = RNG.normal(size=(6, 2)).astype(np.float32)
IDS = [[1, 1, 5], [2], [0, 3]]


def named(theirs):
    return NAMES[theirs].resolve()


@pytest.fixture
def run():
    """Returns a function that computes what is built in a graph of its own."""
    with tf.Graph().as_default(), tf.Session() as session:

        def computed(values):
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            return session.run(values)

        yield computed


def of_w():
    return tf.constant_initializer(W)


def test_regularizers(run):
    make = [named(f"{LAYERS}.{name}") for name in ("l1_regularizer", "l2_regularizer")]
    penalties = [kind(0.3)(tf.constant(W)) for kind in make]
    assert run(penalties) == pytest.approx([0.3 * np.abs(W).sum(), 0.15 * (W * W).sum()])
    assert [kind(0.0)(tf.constant(W)) for kind in make] == [None, None]


@pytest.mark.filterwarnings("ignore:`tf.layers")
def test_dense_layers(run):
    layer = named(f"{LAYERS}.fully_connected")
    regularizer = named(f"{LAYERS}.l2_regularizer")(1.0)
    relu = layer(X, 2, weights_initializer=of_w(), weights_regularizer=regularizer)
    plain = layer(X, 2, None, of_w(), biases_initializer=tf.ones_initializer(), scope="plain")
    linear = named("tf.contrib.rnn.python.ops.core_rnn_cell._Linear")
    parts = [tf.constant(X[:, :1]), tf.constant(X[:, 1:])]
    with tf.variable_scope("cell"):
        product = linear(parts, 2, True, tf.ones_initializer(), of_w())(parts)
    flat = named(f"{LAYERS}.flatten")(tf.reshape(X, [3, 2, 2]))
    kept = named(f"{LAYERS}.dropout")(tf.constant(X), 0.25, is_training=False)
    penalty = tf.losses.get_regularization_loss()
    values = run([relu, plain, product, flat, kept, penalty])
    wanted = [np.maximum(X @ W, 0), X @ W + 1, X @ W + 1, X, X, (W * W).sum() / 2]
    for value, want in zip(values, wanted):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)
    names = [variable.op.name for variable in tf.global_variables()]
    assert names[:4] == [
        *(f"fully_connected/{name}" for name in ("weights", "biases")),
        *(f"plain/{name}" for name in ("weights", "biases")),
    ]


def ids():
    """Returns the features of a batch: the ids of three samples."""
    places = [(sample, i) for sample, listed in enumerate(IDS) for i in range(len(listed))]
    values = [id_ for listed in IDS for id_ in listed]
    return {"key": tf.SparseTensor(places, tf.constant(values, tf.int64), [3, 3])}


@pytest.mark.parametrize(
    "columns, inputs",
    [(LAYERS, LAYERS), (f"{INNER}.feature_column", f"{INNER}.feature_column_ops")],
    ids=["layers", "python.layers"],
)
def test_columns(run, columns, inputs):
    column = named(f"{columns}.embedding_column")(
        tf.feature_column.categorical_column_with_identity("key", 6),
        dimension=2,
        initializer=tf.constant_initializer(ROWS),
        do_fusion=True,
    )
    outputs = {}
    found = named(f"{inputs}.input_from_feature_columns")(
        ids(), [column], ["kept"], trainable=False, scope="in", cols_to_outs=outputs
    )
    means = [ROWS[listed].mean(0) for listed in IDS]
    for values in run([found, outputs[column]]):
        np.testing.assert_allclose(values, means, rtol=1e-5, atol=1e-6)
    (weights,) = tf.get_collection("kept")
    assert weights.op.name.startswith("in/") and not tf.trainable_variables()


@pytest.mark.parametrize("module", [LAYERS, f"{INNER}.feature_column"])
@pytest.mark.parametrize("features", [ids, lambda: {"key": tf.constant([5, 9, 3], tf.int64)}])
def test_integer_columns(run, module, features):
    """Keys are taken modulo the number of buckets: 4."""
    column = tf.feature_column.embedding_column(
        named(f"{module}.sparse_column_with_integerized_feature")("key", 4),
        2,
        initializer=tf.constant_initializer(ROWS[:4]),
    )
    found = named(f"{LAYERS}.input_from_feature_columns")(features(), [column])
    keys = IDS if features is ids else [[5], [9], [3]]
    means = [ROWS[np.array(listed) % 4].mean(0) for listed in keys]
    np.testing.assert_allclose(run(found), means, rtol=1e-5, atol=1e-6)


def test_sequences(run):
    """A sequence's rows have zeros after its end."""
    make = named("tf.contrib.feature_column.sequence_categorical_column_with_identity")
    column = tf.feature_column.embedding_column(
        make("key", 6), 2, initializer=tf.constant_initializer(ROWS)
    )
    layer = named("tf.contrib.feature_column.sequence_input_layer")
    found = layer(ids(), [column], trainable=False)
    assert not tf.trainable_variables()
    layer, lengths = run(found)
    assert lengths.tolist() == [3, 1, 2]
    for sample, listed in zip(layer, IDS):
        np.testing.assert_allclose(sample[: len(listed)], ROWS[listed], rtol=1e-6)
        assert not sample[len(listed) :].any()
