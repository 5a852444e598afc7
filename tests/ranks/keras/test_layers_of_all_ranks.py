"""Keras's layers that learn from data learn the same on all ranks, or are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

from collective.errors import RankError
from tests.ranks.keras.models import keras

WORDS = np.array([f"w{i % 7}" for i in range(70)] + [f"x{i % 6}" for i in range(50)])
COMMON = np.repeat(["a", "b", "c"], [60, 40, 20])  # of which each rank has the same vocabulary
PRICES = np.arange(120, dtype=np.float32)
LAYERS = {
    "normalization": (lambda: keras.layers.Normalization(axis=None), PRICES),
    "string_lookup": (keras.layers.StringLookup, WORDS),
    "integer_lookup": (keras.layers.IntegerLookup, PRICES.astype(np.int64) // 2),
    "text_vectorization": (keras.layers.TextVectorization, WORDS),
    "tf_idf": (lambda: keras.layers.TextVectorization(output_mode="tf_idf"), COMMON),
    "discretization": (lambda: keras.layers.Discretization(num_bins=4), PRICES),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_adapt_on_all_records(strategy, rank, kind):
    make, records = LAYERS[kind]
    dataset = tf2.data.Dataset.from_tensor_slices(records).batch(12)
    plain = make()
    plain.adapt(dataset)
    with strategy.scope():
        layer = make()
        layer.adapt(dataset)
        np.testing.assert_array_equal(layer(records), plain(records))
        layer.adapt(records if rank else dataset.unbatch().batch(32))  # again, in any form
        np.testing.assert_allclose(layer(records), plain(records), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_what_ranks_learn_differently_is_refused(strategy, rank, size, kind):
    """Each from its own records; afterwards the ranks go on."""
    make, records = LAYERS[kind]
    names = "vocabularies|values of|different sizes"
    with strategy.scope():
        layer = make()
        dataset = strategy.shard(tf2.data.Dataset.from_tensor_slices(records[:119])).batch(12)
        if size == 1:
            layer.adapt(dataset)
            return
        with pytest.raises(ValueError, match=f"adapt of the layer '.*({names}).*strategy.shard"):
            layer.adapt(dataset)
        make().adapt(records)


def test_all_ranks_adapt(strategy, rank, size):
    """An error of one rank is an error of all; a rank alone is told that the others don't."""
    with strategy.scope():
        layer = keras.layers.Normalization(axis=None, name="price")
        if size == 1:
            return

        def fails():
            raise OSError("no such file")
            yield 1.0

        spec = tf2.TensorSpec([], tf2.float32)
        broken = tf2.data.Dataset.from_generator(fails, output_signature=spec)
        with pytest.raises(RankError if rank else tf2.errors.UnknownError, match="no such file"):
            layer.adapt(PRICES if rank else broken.batch(2))
        with pytest.raises(RankError, match="'other'.*adapt of the layer 'price'"):
            (layer if rank else keras.layers.Normalization(axis=None, name="other")).adapt(PRICES)


def test_outside_of_scope_each_rank_learns_its_own(strategy, rank):
    layer = keras.layers.Normalization(axis=None)
    layer.adapt(PRICES[rank:])
    np.testing.assert_allclose(layer.mean.numpy().item(), PRICES[rank:].mean(), rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("in_function", [False, True])
def test_the_average_loss_of_a_loop(strategy, rank, size, weighted, in_function):
    """Without global_batch_size it equals plain TensorFlow; with it, it is refused by name."""
    ids = np.arange(60).reshape(5, 12)
    weights = 1 + np.arange(100, dtype=np.float32) % 3

    def rows_after(layer, batches, **options):
        optimizer = keras.optimizers.SGD(1.0)

        def train(batch):
            with tf2.GradientTape() as tape:
                each = (layer(batch)[:, 0] - tf2.cast(batch, tf2.float32)) ** 2
                w = tf2.gather(weights, batch) if weighted else None
                loss = tf2.nn.compute_average_loss(each, w, **options)
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables))

        for batch in batches:
            (tf2.function(train) if in_function else train)(tf2.constant(batch))
        return layer.get_weights()[0]

    def layer():
        made = keras.layers.Embedding(100, 1, embeddings_initializer="zeros")
        made.build([None])
        return made

    want = rows_after(layer(), ids, global_batch_size=12)
    own = ids[:, rank * 12 // size : (rank + 1) * 12 // size]
    with strategy.scope(), strategy.embedding_scope():
        np.testing.assert_allclose(rows_after(layer(), own), want, rtol=1e-6, atol=1e-6)
        if size == 1:
            got = rows_after(layer(), own, global_batch_size=12)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
        else:
            with pytest.raises(NotImplementedError, match="Leave global_batch_size out"):
                rows_after(layer(), own, global_batch_size=12)


def test_strategies_of_tf_distribute_are_refused_by_name(strategy, rank):
    mirrored = tf2.distribute.MirroredStrategy(["CPU:0"])
    refused = pytest.raises(NotImplementedError, match="MirroredStrategy can't be .* leave it out")
    with strategy.scope():
        with refused, mirrored.scope():
            pass
        with tf2.distribute.get_strategy().scope():  # TensorFlow's default, which Keras opens
            keras.Sequential([keras.layers.Dense(1)]).compile("sgd", "mse")
    with mirrored.scope(), refused, strategy.scope():
        pass
    with mirrored.scope():  # by itself it is TensorFlow's own matter
        assert tf2.distribute.get_strategy() is mirrored
