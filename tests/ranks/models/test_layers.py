"""Layers, tf.Variable, templates and getters of a model's own work inside embedding_scope()."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from collective import Table
from tests.ranks import grouped, reference

pytestmark = pytest.mark.either_backend

IDS = np.random.default_rng(0).integers(0, 9, (grouped.B, 4))
X = np.random.default_rng(1).normal(size=(grouped.B, 3)).astype(np.float32)
Y = np.random.default_rng(2).integers(0, 2, (grouped.B, 3)).astype(np.float32)
STEP = {"ids": IDS, "x": X, "y": Y}
keras = tf.keras


def first(seed):
    """Makes a Keras initializer that gives the same whole table everywhere.

    TensorFlow's random ones don't.
    """
    return lambda shape, dtype=None, **_: tf.constant(
        reference.table_values(shape[0], shape[1], seed), dtype or tf.float32
    )


def compare(strategy, rank, size, model, tables=None, rtol=2e-5):
    """Asserts that training gives plain TensorFlow's numbers, and which variables are tables.

    Args:
        model: model(embedding_scope, ids, x, y) -> (loss, {name of a table: the table}).
        tables: names of the expected tables; by default those that the model gives.
    """

    def build(embedding_scope):
        feeds = {
            "ids": tf.placeholder(tf.int64, [None, 4]),
            "x": tf.placeholder(tf.float32, [None, 3]),
            "y": tf.placeholder(tf.float32, [None, 3]),
        }
        loss, given = model(embedding_scope, **feeds)
        made.append(sorted(v.op.name for v in tf.trainable_variables() if isinstance(v, Table)))
        kept = {
            v.op.name: v.read_value() for v in tf.trainable_variables() if v.op.name not in given
        }
        train = tf.train.AdagradOptimizer(0.3).minimize(loss)
        return {
            "train": train,
            "loss": loss,
            "kept": kept,
            "rows": grouped.rows_of(given),
            "names": names(given),
        }, feeds

    def names(given):
        wanted.append(sorted(given))
        return tf.no_op()

    made, wanted = [], []
    runs = [(["loss", "train"], STEP)] * 2 + [(["kept", "rows"], {})]
    want, got = grouped.both(strategy, rank, size, build, runs)
    assert made == [[], wanted[1] if tables is None else tables]
    grouped.same(got[-1], want[-1], rtol)


def embedding(name, seed=3, rows=9, dim=3, **kwargs):
    return keras.layers.Embedding(
        rows, dim, embeddings_initializer=first(seed), name=name, **kwargs
    )


@pytest.mark.parametrize("options", [{}, {"input_length": 4}, {"mask_zero": True}], ids=str)
def test_an_embedding_is_a_table(strategy, rank, size, options):
    """Its mask is passed on to layers that ask for it."""

    def model(embedding_scope, ids, x, y):
        layer = embedding("e", **options)
        with embedding_scope():
            rows = layer(ids)
        mask = layer.compute_mask(ids)
        weights = tf.ones_like(ids, tf.float32) if mask is None else tf.cast(mask, tf.float32)
        assert (mask is None) == (not options.get("mask_zero"))
        return tf.reduce_mean(tf.square(tf.reduce_sum(rows * weights[:, :, None], 1) * x)), {
            "e/embeddings": layer.embeddings
        }

    compare(strategy, rank, size, model)


def test_a_model_of_layers(strategy, rank, size):
    """Two Embeddings, a Dense and a loss of Keras; kernels of Keras's Dense are no tables, wherever
    it is built.
    """

    def model(embedding_scope, ids, x, y):
        with embedding_scope():
            user, item = embedding("user", 3), embedding("item", 4, dim=2)
            dense = keras.layers.Dense(3, "sigmoid", kernel_initializer=first(5), name="dense")
            rows = tf.concat([user(ids[:, 0]), item(ids[:, 1]), x], 1)
            score = dense(rows)
        return keras.losses.BinaryCrossentropy()(y, score), {
            "user/embeddings": user.embeddings,
            "item/embeddings": item.embeddings,
        }

    compare(strategy, rank, size, model)


def test_a_sequential_model(strategy, rank, size):
    def model(embedding_scope, ids, x, y):
        with embedding_scope():
            layers = keras.Sequential(
                [
                    embedding("e", input_length=4),
                    keras.layers.Flatten(),
                    keras.layers.Dense(3, kernel_initializer=first(5), name="dense"),
                ]
            )
            score = layers(ids)
        assert layers.trainable_weights[0] is layers.layers[0].embeddings
        return tf.reduce_mean(keras.losses.MeanSquaredError()(y, score)), {
            "e/embeddings": layers.layers[0].embeddings
        }

    compare(strategy, rank, size, model)


def test_rows_of_embeddings_start_by_their_names(strategy, rank, size):
    """Keras's own default initializer: uniform within 0.05, another for each layer, the same for
    any number of ranks.
    """
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(1)
        with strategy.embedding_scope():
            layers = [keras.layers.Embedding(50, 4), keras.layers.Embedding(50, 4)]
            for layer in layers:
                layer(tf.constant([0]))
        with tf.variable_scope("as"), strategy.embedding_scope():
            like = tf.get_variable(
                "get_variable", [50, 4], initializer=tf.random_uniform_initializer(-0.05, 0.05)
            )
        assert [v.op.name for v in tf.global_variables()] == [
            "embedding/embeddings",
            "embedding_1/embeddings",
            like.op.name,
        ]
        rows = [tf.nn.embedding_lookup(v, tf.range(50)) for v in tf.global_variables()]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            one, other, _ = session.run(rows)
        assert np.abs(one).max() <= 0.05 < np.abs(one).max() + 0.01 and not np.allclose(one, other)


def test_an_embedding_outside_is_replicated(strategy, rank, size):
    def model(embedding_scope, ids, x, y):
        with embedding_scope():
            t = reference.table("t", 9, 3)
        rows = embedding("e")(ids[:, 0]) + tf.nn.embedding_lookup(t, ids[:, 1])
        return tf.reduce_mean(tf.square(rows * x)), {"t": t}

    compare(strategy, rank, size, model)


def test_a_constraint_of_a_table_is_refused(strategy, rank, size):
    """Plain TensorFlow has none for sparse updates either, but doesn't say whose."""
    for optimizer in (
        tf.train.AdagradOptimizer(0.1).minimize,
        lambda loss: tf2.keras.optimizers.legacy.SGD(0.1).get_updates(
            loss, tf.trainable_variables()
        ),
    ):
        with strategy.scope(), tf.Graph().as_default():
            with strategy.embedding_scope():
                rows = embedding("e", embeddings_constraint="unit_norm")(tf.constant([1, 2]))
            with pytest.raises(RuntimeError, match="'e/embeddings'.*constraint"):
                optimizer(tf.reduce_mean(rows))


def test_small_variables_can_be_left_replicated(strategy, rank, size):
    """min_rows, also of the embedding_scope() around: kernels of tf.layers.dense in a model that is
    built inside.
    """

    def model(embedding_scope, ids, x, y):
        with embedding_scope(
            **({"min_rows": 9} if embedding_scope == strategy.embedding_scope else {})
        ):
            with embedding_scope():
                t, small = reference.table("t", 9, 3), reference.table("small", 8, 3)
                few = embedding("few", rows=8)(ids[:, 1] % 8)
            rows = (
                tf.nn.embedding_lookup(t, ids[:, 0])
                + tf.nn.embedding_lookup(small, ids[:, 2] % 8)
                + few
            )
            hidden = tf.layers.dense(
                rows * x,
                4,
                tf.nn.relu,
                kernel_initializer=tf.constant_initializer(reference.table_values(3, 4)),
                name="hidden",
            )
        return tf.reduce_mean(tf.square(hidden)), {"t": t}

    compare(strategy, rank, size, model)


def test_a_dense_layer_that_is_a_table(strategy, rank, size):
    """A kernel that tf.layers makes in embedding_scope() is read whole."""

    def model(embedding_scope, ids, x, y):
        with embedding_scope():
            t = reference.table("t", 9, 3)
            hidden = tf.layers.dense(
                tf.nn.embedding_lookup(t, ids[:, 0]) * x,
                4,
                tf.nn.relu,
                name="hidden",
                kernel_initializer=tf.constant_initializer(reference.table_values(3, 4)),
            )
        return tf.reduce_mean(tf.square(hidden)), {"t": t}

    compare(strategy, rank, size, model, tables=["hidden/kernel", "t"])


def test_a_dynamic_table_has_no_number_of_rows(strategy):
    with strategy.scope(), tf.Graph().as_default(), strategy.embedding_scope(min_rows=1000):
        assert tf.get_variable("d", [None, 3]).rows is None
        assert not isinstance(tf.get_variable("s", [999, 3]), Table)
        with strategy.embedding_scope(min_rows=3):
            assert isinstance(tf.get_variable("t", [999, 3]), Table)
        assert not isinstance(tf.get_variable("u", [999, 3]), Table)


@pytest.mark.parametrize("rows", [-1, 2.0, True, "3", None])
def test_min_rows_is_a_number_of_rows(strategy, rows):
    with pytest.raises(ValueError, match="min_rows"):
        strategy.embedding_scope(min_rows=rows)


def test_a_variable_that_is_not_got_is_replicated(strategy, rank, size):
    """tf.Variable inside embedding_scope()."""

    def model(embedding_scope, ids, x, y):
        with embedding_scope():
            t = reference.table("t", 9, 3)
            v = tf.Variable(reference.table_values(9, 3, 4), name="v")
        return tf.reduce_mean(
            tf.square((tf.nn.embedding_lookup(t, ids[:, 0]) + tf.gather(v, ids[:, 1])) * x)
        ), {"t": t}

    compare(strategy, rank, size, model)


def test_a_template_shares_its_table(strategy, rank, size):
    def model(embedding_scope, ids, x, y):
        def tower(ids):
            with embedding_scope():
                t = reference.table("t", 9, 3)
            return tf.nn.embedding_lookup(t, ids) * tf.get_variable(
                "w", initializer=reference.table_values(1, 3)
            ), t

        shared = tf.make_template("tower", tower)
        (one, t), (other, again) = shared(ids[:, 0]), shared(ids[:, 1])
        assert t is again
        return tf.reduce_mean(tf.square((one - other) * x)), {"tower/t": t}

    compare(strategy, rank, size, model)


def test_a_table_is_reused(strategy, rank, size):
    def model(embedding_scope, ids, x, y):
        with tf.variable_scope("s"), embedding_scope():
            t = reference.table("t", 9, 3)
        with tf.variable_scope("s", reuse=True):
            outside = tf.get_variable("t", [9, 3])
        with embedding_scope(), tf.variable_scope("s", reuse=tf.AUTO_REUSE):
            inside = tf.get_variable("t", [9, 3])
        assert t is outside is inside
        return tf.reduce_mean(tf.square(tf.nn.embedding_lookup(outside, ids[:, 0]) * x)), {"s/t": t}

    compare(strategy, rank, size, model)


def test_a_getter_of_the_scripts_own(strategy, rank, size):
    """It renames, gives an initializer and scales what it is given."""

    def getter(getter, name, *args, **kwargs):
        kwargs["initializer"] = tf.constant_initializer(reference.table_values(9, 3, 6))
        return getter(f"{name}_mine", *args, **kwargs)

    def model(embedding_scope, ids, x, y):
        with tf.variable_scope("s", custom_getter=getter), embedding_scope():
            t = tf.get_variable("t", [9, 3])
        with embedding_scope():
            u = tf.get_variable("u", [9, 3], custom_getter=getter)
        rows = tf.nn.embedding_lookup(t, ids[:, 0]) + tf.nn.embedding_lookup(u, ids[:, 1])
        return tf.reduce_mean(tf.square(rows * x)), {"s/t_mine": t, "u_mine": u}

    compare(strategy, rank, size, model)


LOSSES = {
    "BinaryCrossentropy": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "MeanSquaredError": keras.losses.MeanSquaredError,
    "Huber": lambda: keras.losses.Huber(0.5),
    "CategoricalCrossentropy": lambda: keras.losses.CategoricalCrossentropy(from_logits=True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_keras(strategy, rank, size, name):
    """Means over a batch, as training on several ranks needs them."""

    def model(embedding_scope, ids, x, y):
        with embedding_scope():
            t = reference.table("t", 9, 3)
        return LOSSES[name]()(y, tf.nn.embedding_lookup(t, ids[:, 0]) * x), {"t": t}

    compare(strategy, rank, size, model)
