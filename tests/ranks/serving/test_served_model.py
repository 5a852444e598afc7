"""TensorFlow's own operations serve a SavedModel with the numbers that NumPy computes."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import feature_column, get_embedding_variable
from tests.ranks import reference
from tests.ranks.exports import one_table, served, signature, trained

pytestmark = [pytest.mark.either_backend, pytest.mark.backends("hb")]


def pooled(rows, samples, combiner="mean", weights=None, max_norm=None):
    """Combines by NumPy `rows` of the ids of each sample; a sample without ids is zeros."""
    out = np.zeros((len(samples), rows.shape[1]), np.float64)
    for i, ids in enumerate(samples):
        w = np.ones(len(ids)) if weights is None else np.array(weights[i], np.float64)
        picked = rows[np.array(ids, np.int64)].astype(np.float64).reshape(len(ids), rows.shape[1])
        if max_norm is not None:
            picked *= np.minimum(
                1.0, max_norm / np.maximum(np.linalg.norm(picked, axis=1, keepdims=True), 1e-12)
            )
        if len(ids):
            total = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
            out[i] = (w[:, None] * picked).sum(0) / total
    return out


def sparse(samples, dtype=np.int64):
    """Returns (indices, values, dense shape) of a batch of lists."""
    where = [(i, j) for i, ids in enumerate(samples) for j in range(len(ids))]
    return (
        np.array(where, np.int64).reshape(-1, 2),
        np.array([x for ids in samples for x in ids], dtype),
        np.array([len(samples), max(map(len, samples))], np.int64),
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 2, 7, 300])
def test_every_way_to_look_up_a_static_table(strategy, folder, rows):
    values = reference.table_values(rows, 3)
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, rows, [4, 5])
    samples = [list(rng.integers(0, rows, n)) for n in (2, 0, 5, 1)]
    full = [s or [0] for s in samples]
    weights = [list(rng.uniform(0.5, 2, len(s)).astype(np.float32)) for s in full]

    def build():
        t = reference.table("t", rows, 3)
        w = tf.get_variable("w", [3], initializer=tf.ones_initializer())
        p = tf.placeholder(tf.int64, [None, 5])
        empty, filled, weighted = (
            tf.sparse_placeholder(d, [None, None]) for d in (tf.int64, tf.int64, tf.float32)
        )
        outputs = {
            "rows": tf.nn.embedding_lookup(t, p) * w,
            "list": tf.nn.embedding_lookup([t], p, max_norm=0.5),
            "gather": tf.gather(t, p),
            "safe": tf.nn.safe_embedding_lookup_sparse(t, empty),
            "layer": tf.feature_column.input_layer(
                {"x": p},
                [
                    tf.feature_column.embedding_column(
                        tf.feature_column.categorical_column_with_identity("x", rows),
                        4,
                        initializer=tf.constant_initializer(reference.table_values(rows, 4)),
                    )
                ],
            ),
        }
        for combiner in ("sum", "mean", "sqrtn"):
            outputs[combiner] = tf.nn.embedding_lookup_sparse(
                t, filled, weighted, combiner=combiner, max_norm=1.0
            )
        inputs = {
            "p": p,
            **{
                f"{name}{i}": part
                for name, s in (("empty", empty), ("filled", filled), ("weighted", weighted))
                for i, part in enumerate((s.indices, s.values, s.dense_shape))
            },
        }
        return inputs, outputs

    prefix = trained(strategy, build, folder)
    path = strategy.export_saved_model(
        os.path.join(folder, "export"), prefix, signature(strategy, build)
    )
    feeds = {"p": ids}
    for name, batch in (
        ("empty", sparse(samples)),
        ("filled", sparse(full)),
        ("weighted", sparse(weights, np.float32)),
    ):
        feeds.update({f"{name}{i}": part for i, part in enumerate(batch)})
    got = served(path, feeds)
    np.testing.assert_array_equal(got["rows"], values[ids])
    np.testing.assert_array_equal(got["gather"], values[ids])
    norms = np.linalg.norm(values[ids], axis=-1, keepdims=True)
    np.testing.assert_allclose(got["list"], values[ids] * np.minimum(1, 0.5 / norms), rtol=1e-5)
    np.testing.assert_allclose(got["safe"], pooled(values, samples), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        got["layer"], pooled(reference.table_values(rows, 4), list(ids)), rtol=1e-5, atol=1e-6
    )
    for combiner in ("sum", "mean", "sqrtn"):
        np.testing.assert_allclose(
            got[combiner], pooled(values, full, combiner, weights, 1.0), rtol=1e-5, atol=1e-6
        )


EXTREME = [-(2**63), -1, 0, 2**63 - 1]


def dynamic_model():
    """Returns inputs and outputs, and the tables: of keys, of words, and of a feature column."""
    t = get_embedding_variable("t", 3, initializer=tf.zeros_initializer())
    by_word = get_embedding_variable("words", 2, tf.string, initializer=tf.ones_initializer())
    p, told = tf.placeholder(tf.int64, [None, None]), tf.placeholder(tf.string, [None])
    ids, weights = (
        tf.sparse_placeholder(tf.int64, [None, None]),
        tf.sparse_placeholder(tf.float32, [None, None]),
    )
    column = tf.feature_column.embedding_column(
        feature_column.categorical_column_with_embedding("p"), 2, initializer=tf.ones_initializer()
    )
    outputs = {
        "rows": tf.nn.embedding_lookup([t], p),
        "gather": tf.gather(t, p),
        "int32": tf.nn.embedding_lookup(t, tf.cast(p % 100, tf.int32)),
        "mean": tf.nn.safe_embedding_lookup_sparse(t, ids),
        "default": tf.nn.safe_embedding_lookup_sparse(t, ids, default_id=-1),
        "sqrtn": tf.nn.safe_embedding_lookup_sparse(
            [t], ids, weights, combiner="sqrtn", max_norm=1.0
        ),
        "sum": tf.nn.embedding_lookup_sparse(t, ids, weights, combiner="sum"),
        "words": tf.nn.embedding_lookup(by_word, told),
        "layer": tf.feature_column.input_layer({"p": p}, [column]),
    }
    inputs = {
        "p": p,
        "told": told,
        **{
            f"{name}{i}": part
            for name, s in (("ids", ids), ("weights", weights))
            for i, part in enumerate((s.indices, s.values, s.dense_shape))
        },
    }
    return inputs, outputs, t


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [0, 1, 60])
def test_every_way_to_look_up_a_dynamic_table(strategy, folder, count):
    """Of which so many keys are known, fewer than ranks perhaps; one step of training gave them
    rows that NumPy knows.
    """
    rng = np.random.default_rng(count)
    keys = np.array([*EXTREME, 5, *rng.integers(-(2**62), 2**62, 55)], np.int64)[:count]
    # the last: of no key
    values = np.concatenate([rng.normal(size=(count, 3)), np.zeros((1, 3))]).astype(np.float32)
    number = {int(key): i for i, key in enumerate(keys)}

    def numbers(asked):
        return [[number.get(int(key), count) for key in sample] for sample in asked]

    asked = np.array(
        [[*EXTREME, 5], [5, 6, -7, EXTREME[1], int(keys[-1]) if count else 0]], np.int64
    )
    samples, weights = (
        [list(asked[0]), [], [5, 77, -1], []],
        [[1.0, -1.0, 0.0, 2.0, 0.5], [], [0.5, 3.0, 1.0], []],
    )
    feeds = {
        "p": asked,
        "told": ["to", "?"],
        **{f"ids{i}": part for i, part in enumerate(sparse(samples))},
        **{f"weights{i}": part for i, part in enumerate(sparse(weights, np.float32))},
    }
    with strategy.scope(), tf.Graph().as_default():
        inputs, outputs, t = dynamic_model()
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, keys) * -values[:-1]) + 0.0 * (
            tf.reduce_sum(outputs["words"]) + tf.reduce_sum(outputs["layer"])
        )
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if count:
                session.run(train, {inputs["told"]: ["to", "be"], inputs["p"]: keys[:, None]})
            here = session.run(outputs, {inputs[name]: value for name, value in feeds.items()})
            prefix = tf.train.Saver().save(session, os.path.join(folder, "model"))
    path = strategy.export_saved_model(
        os.path.join(folder, "export"), prefix, signature(strategy, lambda: dynamic_model()[:2])
    )
    got = served(path, feeds)
    for name in here:
        # Rounded otherwise: owners add up their parts of a sample (sok), and a group multiplies
        # where TensorFlow divides.
        np.testing.assert_allclose(got[name], here[name], rtol=1e-6, atol=1e-7, err_msg=name)
    assert served(path, {**feeds, "p": np.zeros([0, 5])})["rows"].shape == (0, 5, 3)
    rows = values[np.array(numbers(asked))]
    want = {
        "rows": rows,
        "gather": rows,
        "int32": values[np.array(numbers(asked % 100))],
        "mean": pooled(values, numbers(samples)),
        "default": pooled(values, numbers([sample or [-1] for sample in samples])),
        "sqrtn": pooled(
            values,
            numbers([[k for k, w in zip(*both) if w > 0] for both in zip(samples, weights)]),
            "sqrtn",
            [[w for w in ws if w > 0] for ws in weights],
            1.0,
        ),
        "sum": pooled(values, numbers(samples), "sum", weights)[:3],
        "words": [[1, 1] if count else [0, 0], [0, 0]],
        "layer": np.tile(np.mean(np.array(numbers(asked)) < count, axis=1, keepdims=True), 2),
    }
    assert set(want) == set(got)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_tables_that_are_used_as_one_value(strategy, folder):
    """The kernel of a dense layer that was built in embedding_scope(), slices, products, norms."""
    values = reference.table_values(7, 3)

    def build():
        t, x = reference.table("t", 7, 3), tf.placeholder(tf.float32, [None, 7])
        layer = tf.layers.dense(
            x, 3, use_bias=False, name="layer", kernel_initializer=tf.constant_initializer(values)
        )
        return {"x": x}, {
            "layer": layer,
            "product": tf.matmul(x, t),
            "slice": t[2:, 1],
            "sum": 2.0 * t + t.read_value(),
            "norm": tf.nn.l2_loss(t),
        }

    path = strategy.export_saved_model(
        os.path.join(folder, "export"), trained(strategy, build, folder), signature(strategy, build)
    )
    x = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)
    want = {
        "layer": x @ values,
        "product": x @ values,
        "slice": values[2:, 1],
        "sum": 3 * values,
        "norm": 0.5 * np.sum(np.square(values)),
    }
    got = served(path, {"x": x})
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["layer", "by hand"])
def test_averages_that_training_alone_moves(strategy, folder, kind):
    """In a model that has a switch for it: the mean over ranks is none of what is served."""

    def build():
        x, training = tf.placeholder(tf.float32, [None, 2]), tf.placeholder_with_default(False, [])
        rows = x + tf.nn.embedding_lookup(reference.table("t", 5, 2), [0])
        if kind == "layer":
            out = tf.layers.batch_normalization(rows, training=training, epsilon=0.0)
        else:
            mean = tf.get_variable(
                "mean", [1, 2], initializer=tf.zeros_initializer(), trainable=False
            )

            def moved():
                with tf.control_dependencies([mean.assign(tf.reduce_mean(rows, 0, keepdims=True))]):
                    return tf.identity(mean)

            out = rows - tf.cond(training, moved, lambda: tf.identity(mean))
        return {"x": x}, {"out": out}

    path = strategy.export_saved_model(
        os.path.join(folder, "export"), trained(strategy, build, folder), signature(strategy, build)
    )
    x = np.ones([3, 2], np.float32)
    np.testing.assert_allclose(
        served(path, {"x": x})["out"], x + reference.table_values(5, 2)[0], rtol=1e-6
    )


def test_metrics_that_a_model_has_in_every_mode(strategy, folder):
    """They are each process's own where it is served."""

    def build():
        inputs, outputs = one_table()
        tf.metrics.mean(outputs["rows"])
        return inputs, outputs

    path = strategy.export_saved_model(
        os.path.join(folder, "export"),
        trained(strategy, one_table, folder),
        signature(strategy, build),
    )
    np.testing.assert_array_equal(
        served(path, {"p": [1, 3]})["rows"], reference.table_values(5, 2)[[1, 3]]
    )


def test_an_id_outside_of_the_table(strategy, folder):
    path = strategy.export_saved_model(
        folder, trained(strategy, one_table, folder), signature(strategy, one_table)
    )
    for wrong in (-1, 5, 2**40):
        with pytest.raises(tf.errors.InvalidArgumentError):
            served(path, {"p": [0, wrong]})
