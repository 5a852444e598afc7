"""`collective.keras.layers.Embedding`: dynamic and static tables equal plain Keras's embeddings."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
import tensorflow as tf2

from collective import keras as collective_keras
from collective.errors import TableError
from tests.ranks import grouped
from tests.ranks.keras.models import BATCH, keras, part
from tests.ranks.keras.test_functions import OPTIMIZERS as ALL_OPTIMIZERS
from tests.ranks.keras.test_functions import new

STEPS, ITEMS, TAGS, WORDS = 12, 30, 9, 20
OPTIMIZERS = {
    # What Keras's Nadam computes depends on how often a function was traced.
    **{name: make for name, make in ALL_OPTIMIZERS.items() if name not in ("AdamW", "Nadam")},
    "SGD without momentum": lambda: new.SGD(0.05),
    "AdamW": lambda: new.AdamW(0.003, weight_decay=0.01),
    "legacy Nadam": lambda: keras.optimizers.legacy.Nadam(0.003),
    "legacy RMSprop": lambda: keras.optimizers.legacy.RMSprop(0.003),
    "legacy RMSprop in place": lambda: keras.optimizers.legacy.RMSprop(0.003, momentum=0.5),
    "legacy Adadelta": lambda: keras.optimizers.legacy.Adadelta(0.5),
}
# TensorFlow updates rows so only on CPUs.
NOT_ON_GPUS = "legacy RMSprop in place"
# They move rows that no gradient is of, also from their first values: all keys come at once.
FROM_THE_FIRST_STEP = ("Ftrl", "AdamW")


def first_rows(dim: int, rows: int | None = None) -> np.ndarray:
    row = np.linspace(-0.5, 0.7, dim).astype(np.float32)
    return row if rows is None else np.tile(row, [rows, 1])


def data(grows: bool) -> tuple:
    """Returns numbers of items [n], tags [n, 2], words [n, 3] with weights, and labels [n].

    Args:
        grows: whether the items of later batches are new.
    """
    random, records = np.random.default_rng(5), BATCH * STEPS
    last = np.repeat(np.minimum(ITEMS, 6 + 3 * np.arange(STEPS)), BATCH) if grows else 8
    items = random.integers(0, last, records)
    if not grows:
        items[:BATCH] = np.arange(BATCH) % 8
    tags = random.integers(0, TAGS, (records, 2))
    tags[:TAGS] = np.arange(TAGS)[:, None]
    words = random.integers(0, WORDS, (records, 3))
    words[:WORDS] = np.arange(WORDS)[:, None]
    weights = random.uniform(0.5, 2, (records, 3)).astype(np.float32)
    return items, tags, words, weights, random.integers(0, 2, records).astype(np.float32)


def item_keys(items):
    return items * 7919 + 2**40


def tag_keys(tags):
    return tf2.strings.join(["tag", tf2.strings.as_string(tags)])


class Plain(keras.Model):
    """Has plain Keras's embeddings of numbers from 0."""

    def __init__(self):
        super().__init__()
        make, constant = keras.layers.Embedding, keras.initializers.Constant
        self.items = make(ITEMS, 4, constant(first_rows(4, ITEMS)))
        self.tags = make(TAGS, 6, constant(first_rows(6, TAGS)))
        self.words = make(WORDS, 4, constant(first_rows(4, WORDS)))
        self.dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(3))

    def rows(self, items, tags, words, weights):
        rows = self.words(words) * weights[:, :, None]
        total = tf2.reduce_sum(weights, 1)[:, None]
        return [
            self.items(items),
            tf2.reduce_sum(self.tags(tags), 1) / np.float32(np.sqrt(2)),
            tf2.where(total > 0, tf2.reduce_sum(rows, 1) / total, 0.0),
        ]

    def call(self, inputs, training=None):
        return self.dense(tf2.concat(self.rows(*inputs), 1))


class Tables(Plain):
    """Has this library's: of items with dense ids, of tags with ragged ones, of words with sparse
    ones and weights, which has a number of rows.
    """

    def __init__(self):
        super().__init__()
        make, constant = collective_keras.layers.Embedding, keras.initializers.Constant
        self.items = make(4, embeddings_initializer=constant(first_rows(4)))
        self.tags = make(6, combiner="sqrtn", embeddings_initializer=constant(first_rows(6)))
        self.words = make(4, WORDS, "mean", constant(first_rows(4, WORDS)))

    def rows(self, items, tags, words, weights):
        ids = tf2.sparse.from_dense(words + 1)
        ids = tf2.SparseTensor(ids.indices, ids.values - 1, ids.dense_shape)
        weights = tf2.SparseTensor(ids.indices, tf2.reshape(weights, [-1]), ids.dense_shape)
        return [
            self.items(item_keys(items)),
            self.tags(tf2.RaggedTensor.from_tensor(tag_keys(tags))),
            self.words(ids, weights),
        ]


def dataset(arrays, batch):
    *inputs, labels = arrays
    return tf2.data.Dataset.from_tensor_slices((tuple(inputs), labels)).batch(batch)


def compare(model, plain, rank, size, came):
    """Holds that the rows, gathered from the ranks' exports, are plain Keras's.

    Args:
        came: the items of which the model has rows.
    """
    np.testing.assert_allclose(
        model.dense.kernel.numpy(), plain.dense.kernel.numpy(), rtol=0, atol=1e-6
    )
    want = plain.items.embeddings.numpy()
    keys = dict(zip(item_keys(np.arange(ITEMS)).tolist(), want))
    counted = 0
    for own, rows in model.items.embeddings.export():
        counted += len(own)
        for key, row in zip(own.tolist(), rows):
            np.testing.assert_allclose(row, keys[key], rtol=0, atol=1e-6)
    assert counted == model.items.embeddings.local_count() <= came
    holder = model.items.embeddings.placement.holder
    if size == 1 or holder is not None:
        assert counted == (came if holder in (None, rank) else 0)
    tags = tf2.function(lambda x: model.tags(x))(tag_keys(np.arange(TAGS)[:, None]))
    np.testing.assert_allclose(tags, plain.tags.embeddings.numpy(), rtol=0, atol=1e-6)
    words = tf2.function(lambda x: model.words(x))(np.arange(WORDS)[:, None])
    np.testing.assert_allclose(words, plain.words.embeddings.numpy(), rtol=0, atol=1e-6)


def equals(strategy, rank, size, name, **options):
    grows, make = name not in FROM_THE_FIRST_STEP, OPTIMIZERS[name]
    arrays = data(grows)
    plain = Plain()
    plain.compile(make(), "mse")
    want = plain.fit(dataset(arrays, BATCH), epochs=2, verbose=0)
    with strategy.scope():
        model = Tables()
        model.compile(make(), "mse", **options)
        own = dataset(part(arrays, rank, size), BATCH // size)
        got = model.fit(own, epochs=2, verbose=0)
        np.testing.assert_allclose(got.history["loss"], want.history["loss"], rtol=0, atol=1e-6)
        compare(model, plain, rank, size, len(np.unique(arrays[0])))
        # Rank 0 has the most batches; the others answer it.
        first = [0, *(24 - 6 * r for r in range(size - 1, -1, -1))]
        mine = [x[first[rank] : first[rank + 1]] for x in arrays]
        scores = model.evaluate(dataset(mine, 6), verbose=0)
    wanted = plain.evaluate(dataset([x[:24] for x in arrays], 6), verbose=0)
    np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-6)
    return model


@pytest.mark.slow
@pytest.mark.double
@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
def test_tables_of_every_kind_of_ids_equal_plain_keras(strategy, rank, size, caplog):
    """Rows come while it trains; unknown keys of an evaluation get none; the layer's config.

    Making many tables isn't taken for retracing of a function.
    """
    with caplog.at_level("WARNING", logger="tensorflow"), strategy.scope():
        for _ in range(6):
            collective_keras.layers.Embedding(2).build()
    assert "retracing" not in caplog.text
    model = equals(strategy, rank, size, "Adam")
    table = model.items.embeddings
    count = table.local_count()
    with strategy.scope():
        unknown = tf2.constant([[1, 2], [3, 4]], tf2.int64)
        rows = tf2.function(lambda: model.items(unknown))()
        np.testing.assert_array_equal(rows, np.zeros([2, 2, 4]))
        assert table.local_count() == count
        with pytest.raises(TableError, match="Reading the value of table 'tables/.*is dynamic"):
            model.get_weights()
        with pytest.raises(ValueError, match="called with sparse ids, and has no combiner"):
            model.items(tf2.sparse.from_dense([[1]]))
        for layer in (model.items, model.tags, model.words):
            config = keras.layers.serialize(layer)
            again = keras.layers.deserialize(config)
            assert type(again) is type(layer) and again.get_config() == layer.get_config()


@pytest.mark.matrix
@pytest.mark.double
@pytest.mark.either_backend
@pytest.mark.parametrize("name", ["legacy Adam", "legacy Adadelta", "SGD without momentum"])
def test_training_without_a_function_adds_rows(strategy, rank, size, name):
    equals(strategy, rank, size, name, run_eagerly=True)


@pytest.mark.matrix
@pytest.mark.either_backend
@pytest.mark.parametrize(
    "name",
    [
        name if name == NOT_ON_GPUS else pytest.param(name, marks=pytest.mark.double)
        for name in OPTIMIZERS
        if name != "Adam"
    ],
)
def test_every_optimizer_updates_dynamic_tables(strategy, rank, size, name):
    equals(strategy, rank, size, name)


def built(make, arrays):
    """Returns a new model of tables, whose layers have the same names each time."""
    keras.backend.clear_session()
    model = Tables()
    model.compile(make(), "mse")
    tf2.function(lambda: model([x[:2] for x in arrays[:-1]]))()
    return model


@pytest.mark.slow
@pytest.mark.double
@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    "name, there, here",
    [
        ("Adam", "rows", "rows"),
        ("Adam", "rows", "whole:1"),
        ("Adam", "whole", "rows"),
        *(
            pytest.param(name, "rows", "rows", marks=pytest.mark.matrix)
            for name in ("legacy Adam", "SGD")
        ),
    ],
)
def test_training_goes_on_from_a_checkpoint(strategy, rank, size, folder, name, there, here):
    """A model that has trained other keys has those of the checkpoint afterwards, with slots."""
    make, arrays = OPTIMIZERS[name], data(True)
    halves = [x[: 6 * BATCH] for x in arrays], [x[6 * BATCH :] for x in arrays]
    plain = Plain()
    plain.compile(make(), "mse")
    plain.fit(dataset(arrays, BATCH), verbose=0)
    with strategy.scope():
        saved = collective_keras.callbacks.Checkpoint(folder)
        first, second = (dataset(part(half, rank, size), BATCH // size) for half in halves)
        with strategy.embedding_scope(placement=there):
            model = built(make, arrays)
        model.fit(first, verbose=0, callbacks=[saved])
        with strategy.embedding_scope(placement=here):
            other = built(make, arrays)
        others = [arrays[0] + 500, *arrays[1:]]
        other.fit(dataset(part([x[:BATCH] for x in others], rank, size), BATCH // size), verbose=0)
        assert saved.restore(other) == 6
        counts = [each.items.embeddings.local_count() for each in (model, other)]
        assert np.ptp(np.sum(grouped.everyone(counts), 0)) == 0
        holder = other.items.embeddings.placement.holder
        assert holder == (None if here == "rows" else 1 % size)
        other.fit(second, verbose=0)
        compare(other, plain, rank, size, len(np.unique(arrays[0])))
        with pytest.raises(TableError, match="tf.train.Checkpoint of table .*keras.callbacks.Ch"):
            other.save_weights(os.path.join(folder, "weights"))
        with pytest.raises(TableError, match="Reading the value of table .*keras.callbacks.Check"):
            other.save_weights(os.path.join(folder, "weights.h5"))
        with pytest.raises(TableError, match="tf.train.Checkpoint of table .*keras.callbacks.Ch"):
            tf2.train.Checkpoint(model=other).save(os.path.join(folder, "objects"))


@pytest.mark.slow
@pytest.mark.double
@pytest.mark.either_backend
def test_a_saved_model_answers_with_the_rows_of_keys(strategy, rank, size, folder):
    """In plain TensorFlow; an unknown key has zeros there, too."""
    arrays = data(True)
    items, labels = item_keys(arrays[0]), arrays[-1]
    with strategy.scope():
        ids = keras.Input([], dtype=tf2.int64, name="items")
        start = keras.initializers.Constant(first_rows(4))
        rows = collective_keras.layers.Embedding(4, embeddings_initializer=start, name="open")(ids)
        model = keras.Model(ids, keras.layers.Dense(1, name="top")(rows))
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        own = tf2.data.Dataset.from_tensor_slices(tuple(part([items, labels], rank, size)))
        model.fit(own.batch(BATCH // size), verbose=0)
        known = tf2.constant([*np.unique(items), 7])
        want = tf2.function(lambda: model(known))()
        path = strategy.export_saved_model(folder, model=model)
    served = tf2.saved_model.load(path).signatures["serving_default"]
    (answer,) = served(items=known).values()
    np.testing.assert_allclose(answer, want, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.double
@pytest.mark.either_backend
def test_a_session_goes_on_and_fit_with_its_model(strategy, rank, size, folder):
    """With the keys, rows and slots of the other."""
    arrays = data(True)
    items, labels = arrays[0], arrays[-1]

    def build():
        ids = keras.Input([], dtype=tf2.int64, name="items")
        start = keras.initializers.Constant(first_rows(4))
        rows = collective_keras.layers.Embedding(4, embeddings_initializer=start, name="open")(ids)
        start = keras.initializers.GlorotUniform(3)
        top = keras.layers.Dense(1, kernel_initializer=start, name="top")
        return keras.Model(ids, top(rows))

    def batch(first, last):
        own = part([item_keys(items), labels], rank, size)
        step = BATCH // size
        own = tf2.data.Dataset.from_tensor_slices(tuple(x[first * step : last * step] for x in own))
        return own.batch(step)

    with strategy.scope():
        legacy = functools.partial(keras.optimizers.legacy.Adagrad, 0.1)
        whole = build()
        whole.compile(legacy(), "mse")
        whole.fit(batch(0, 9), verbose=0)

        model = build()
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        saved = collective_keras.callbacks.Checkpoint(folder)
        model.fit(batch(0, 3), verbose=0, callbacks=[saved])
        tf = tf2.compat.v1
        with tf.Graph().as_default():
            ids, wanted = tf.data.make_one_shot_iterator(batch(3, 6)).get_next()
            model = build()
            loss = tf.reduce_mean((model(ids)[:, 0] - wanted) ** 2)
            step, optimizer = tf.train.get_or_create_global_step(), legacy()
            gradients = tf.gradients(loss, model.trainable_variables)
            update = optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            with tf.control_dependencies([update]):
                train = step.assign_add(1)
            with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
                while not session.should_stop():
                    session.run(train)
        last = build()
        last.compile(keras.optimizers.Adagrad(0.1), "mse")
        assert saved.restore(last) == 6
        last.fit(batch(6, 9), verbose=0)
        known = tf2.constant(item_keys(np.unique(items[: 9 * BATCH])))
        want = tf2.function(lambda: whole(known))()
        np.testing.assert_allclose(tf2.function(lambda: last(known))(), want, rtol=0, atol=1e-6)


@pytest.mark.double
@pytest.mark.either_backend
def test_keys_are_removed_without_a_session(strategy):
    with strategy.scope():
        with strategy.embedding_scope():
            layer = collective_keras.layers.Embedding(2, embeddings_initializer="ones")
        layer.build()
        table, keys = layer.embeddings, tf2.constant([3, 4, 5], tf2.int64)
        with tf2.GradientTape() as tape:
            loss = tf2.reduce_sum(layer(keys))
        gradients = tape.gradient(loss, [table])
        new.SGD(2.0).apply_gradients(zip(gradients, [table]))
        assert (layer(keys).numpy() < 0).all()
        removed = table.remove(None, np.array([3, 4]))
        np.testing.assert_array_equal(sum(grouped.everyone(int(removed))), 2)
        # Nobody trains them here: a key without a row has zeros.
        assert (layer(keys).numpy() == 0).all(1).tolist() == [True, True, False]
        with pytest.raises(NotImplementedError, match="was made before rows were evicted"):
            new.SGD(2.0).apply_gradients(zip(gradients, [table]))
        table.clear(None)
        assert (layer(keys).numpy() == 0).all()
