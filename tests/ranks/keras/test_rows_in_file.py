"""Rows of eager code's tables go to a file and come back: with the numbers of rows in memory."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

from collective import TablePolicy
from collective import keras as collective_keras
from collective.errors import RankError
from collective.tables.rows import rows_in_file
from tests.ranks.keras.models import keras

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

new, legacy = keras.optimizers, keras.optimizers.legacy
DIM, BATCH, STEPS = 4, 12, 10
# Those that move the rows of a batch.
OPTIMIZERS = {
    "Adagrad": lambda: new.Adagrad(0.1),
    "SGD": lambda: new.SGD(0.1),
    "legacy Adagrad": lambda: legacy.Adagrad(0.1),
    "legacy Ftrl": lambda: legacy.Ftrl(0.1),
}
REFUSED = {
    "Adam": lambda: new.Adam(0.1),
    "SGD with momentum": lambda: new.SGD(0.1, momentum=0.9),
    "legacy Adam": lambda: legacy.Adam(0.1),
}


def data():
    """Returns keys [n, 3], of which early ones return late, and labels [n]."""
    random = np.random.default_rng(2)
    first = 40 * (np.arange(STEPS * BATCH) // BATCH % (STEPS // 2))
    return first[:, None] + random.integers(0, 60, (STEPS * BATCH, 3)), random.random(STEPS * BATCH)


def own(arrays, rank, size):
    batches = [x.reshape(STEPS, BATCH, *x.shape[1:])[:, rank::size] for x in arrays]
    return tf2.data.Dataset.from_tensor_slices(tuple(batches))


def model_with(strategy, policy, optimizer, eagerly):
    with strategy.embedding_scope(policy=policy):
        rows = collective_keras.layers.Embedding(DIM, combiner="sum", name="rows")
    dense = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(1), name="dense"
    )
    model = keras.Sequential([rows, dense])
    model(tf2.zeros([1, 3], tf2.int64))
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    return model, rows


def in_file(folder, batches=3):
    """Returns a policy with memory for about as many rows as so many batches have."""
    return TablePolicy(storage="dram_ssd", storage_path=folder, storage_size=batches * 30 * 4 * DIM)


def exported(table):
    """Returns this rank's rows by their keys."""
    return {int(k): row for keys, rows in table.export() for k, row in zip(keys, rows)}


@pytest.mark.parametrize("eagerly", [False, True], ids=["fit", "run_eagerly"])
@pytest.mark.parametrize(
    "name", [n if n == "Adagrad" else pytest.param(n, marks=pytest.mark.matrix) for n in OPTIMIZERS]
)
def test_numbers_are_those_of_rows_in_memory(strategy, rank, size, folder, name, eagerly):
    results = []
    with strategy.scope():
        for policy in (TablePolicy(), in_file(folder)):
            model, rows = model_with(strategy, policy, OPTIMIZERS[name](), eagerly)
            batches = own(data(), rank, size)
            losses = model.fit(batches, epochs=2, verbose=0).history["loss"]
            assert policy.storage is None or not rows.embeddings.store(None).is_overfull
            held = model.evaluate(batches, verbose=0)
            table = rows.embeddings
            store = table.store(None)
            results.append((losses, held, model.predict(batches, verbose=0), exported(table)))
        assert store.count_in_memory < 0.8 * len(store), "rows are in the file"
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][2], results[1][2])
    assert results[0][1] == results[1][1]
    assert results[0][3].keys() == results[1][3].keys()
    for key, row in results[0][3].items():
        np.testing.assert_array_equal(row, results[1][3][key])


class First(keras.callbacks.Callback):
    """Notes the rows with which `fit` begins."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def on_train_begin(self, logs=None):
        table = self.layer.embeddings
        self.count_in_memory, self.rows = table.store(None).count_in_memory, exported(table)


def test_a_checkpoint_has_the_rows_in_the_file(strategy, rank, size, folder):
    with strategy.scope():
        trained = []
        for part in ("first", "second"):
            policy = in_file(f"{folder}/{part}")
            model, rows = model_with(strategy, policy, new.Adagrad(0.1), False)
            back = collective_keras.callbacks.Checkpoint(f"{folder}/saved", save_freq="epoch")
            first = First(rows)
            model.fit(own(data(), rank, size), epochs=1, verbose=0, callbacks=[back, first])
            trained.append(exported(rows.embeddings))
    assert first.count_in_memory < 0.8 * len(first.rows), "they were read into the file"
    assert first.rows.keys() == trained[0].keys()
    for key, row in first.rows.items():
        np.testing.assert_array_equal(row, trained[0][key])
    assert trained[0].keys() == trained[1].keys()
    # The second went on from what the first had saved.
    assert sum(not np.array_equal(trained[0][key], trained[1][key]) for key in trained[0]) > 20


@pytest.mark.slow
def test_lookups_without_a_function_give_memory_back(strategy, rank, size, folder):
    keys = np.arange(300)
    with strategy.scope():
        model, rows = model_with(strategy, in_file(folder, 1), new.SGD(0.1), False)
        model.train_on_batch(keys[:, None], np.zeros(300))
        table = rows.embeddings
        known = exported(table)
        for first in range(0, 300, 30):
            found = tf2.nn.embedding_lookup(table, tf2.constant(keys[first : first + 30]))
            assert not table.store(None).is_overfull
            for key, row in zip(keys[first : first + 30], found.numpy()):
                if int(key) in known:
                    np.testing.assert_array_equal(row, known[int(key)])


def test_a_function_looks_up_two_tables(strategy, rank, size, folder):
    keys = tf2.range(200, dtype=tf2.int64)
    with strategy.scope():
        with strategy.embedding_scope(policy=in_file(folder, 1)):
            layers = [collective_keras.layers.Embedding(DIM, name=f"rows{i}") for i in range(2)]
        optimizer = new.SGD(0.5)

        @tf2.function
        def step():
            with tf2.GradientTape() as tape:
                loss = tf2.add_n([tf2.reduce_sum(layer(keys)) for layer in layers])
            weights = [layer.embeddings for layer in layers]
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

        step()
        before = [exported(layer.embeddings) for layer in layers]
        step()
        for layer, known in zip(layers, before):
            store = layer.embeddings.store(None)
            assert store.count_in_memory < 0.8 * len(store)
            for key, row in exported(layer.embeddings).items():
                np.testing.assert_allclose(row, known[key] - 0.5, atol=1e-6)


def test_a_gradient_from_before_rows_moved_is_refused(strategy, rank, size, folder):
    keys = tf2.range(100, dtype=tf2.int64)
    with strategy.scope():
        model, rows = model_with(strategy, in_file(folder, 1), new.SGD(0.1), False)
        with tf2.GradientTape() as tape:
            loss = tf2.reduce_sum(rows(keys[:, None]))
        gradients = tape.gradient(loss, rows.trainable_weights)
        before = {key: row.copy() for key, row in exported(rows.embeddings).items()}
        model.predict(keys[:, None], verbose=0)
        with pytest.raises(NotImplementedError, match="made before rows were evicted"):
            model.optimizer.apply_gradients(zip(gradients, rows.trainable_weights))
        for key, row in exported(rows.embeddings).items():
            np.testing.assert_array_equal(row, before[key])


@pytest.mark.slow
def test_peers_learn_of_a_file_that_cannot_be_written(strategy, rank, size, folder, monkeypatch):
    def fail(tables):
        raise OSError("no space")

    with strategy.scope():
        model, _ = model_with(strategy, in_file(folder, 1), new.SGD(0.1), False)
        batch = own(data(), rank, size).take(1)
        model.fit(batch, verbose=0)
        with monkeypatch.context() as patched:
            if rank == size - 1:
                patched.setattr(rows_in_file, "limit_memory", fail)
                with pytest.raises(OSError, match="no space"):
                    model.fit(batch, epochs=2, verbose=0)
            elif size > 1:
                with pytest.raises(RankError, match="failed after a call with OSError: no space"):
                    model.fit(batch, epochs=2, verbose=0)
        model.fit(batch, verbose=0)  # All go on.


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_moves_all_rows_is_refused(strategy, rank, size, folder, name):
    with strategy.scope():
        model, _ = model_with(strategy, in_file(folder), REFUSED[name](), False)
        # TensorFlow adds where in the script it was, and changes the kind.
        with pytest.raises(Exception, match=r"moves all rows of table 'rows/embeddings'.*its file"):
            model.fit(own(data(), rank, size), verbose=0)
