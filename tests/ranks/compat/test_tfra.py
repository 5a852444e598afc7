"""Layers of TensorFlow Recommenders Addons train as plain Keras's Embedding does in one process."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf2

from collective.compat.framework import find
from collective.compat.horovod_stand_in import process, reductions
from collective.compat.names.tfra import TFRA
from collective.keras.callbacks import Checkpoint

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3)]
keras = tf2.keras
BATCH, STEPS, USERS, ITEMS, FIELDS, DIM = 12, 8, 20, 30, 3, 4
de = SimpleNamespace(**{name.attribute: find(name.ours) for name in TFRA.names if name.ours})


@pytest.fixture(autouse=True)
def as_a_script_starts():
    process.init()
    yield
    process.shutdown()
    de.enable_train_mode()


def keys(items):
    """Returns keys that no table with a number of rows could have."""
    return items * 7919 + 2**40


def field(ids):
    return ids % FIELDS


class Model(keras.Model):
    """Joins a user's row with items', and the mean of the items' of each field."""

    def __init__(self, *args, **kwargs):
        super().__init__(name="towers")
        self.make(*args, **kwargs)
        start = keras.initializers.GlorotUniform
        self.mlp = [
            keras.layers.Dense(units, activation, True, start(seed=units), name=f"dense{units}")
            for units, activation in ((8, "relu"), (1, None))
        ]

    def call(self, inputs):
        x = tf2.concat(self.rows(*inputs), 1)
        for layer in self.mlp:
            x = layer(x)
        return x


class Plain(Model):
    def make(self):
        make, constant = keras.layers.Embedding, keras.initializers.Constant
        self.users = make(USERS, DIM, constant(0.3))
        self.items = make(ITEMS, DIM, constant(-0.2))
        self.fields = make(ITEMS, DIM, keras.initializers.Constant(0.1))

    def rows(self, users, items):
        fields = tf2.one_hot(field(keys(items)), FIELDS)
        counts = tf2.maximum(tf2.reduce_sum(fields, 1), 1)[:, :, None]
        means = tf2.einsum("bkf,bkd->bfd", fields, self.fields(items)) / counts
        return [
            self.users(users)[:, 0],
            tf2.reduce_max(self.items(items), 1),
            tf2.reshape(means, [-1, FIELDS * DIM]),
        ]


class Tables(Model):
    def make(self, of_users=de.HvdAllToAllEmbedding, **options):
        creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver(proc_size=1, proc_rank=0))
        self.users = of_users(
            embedding_size=DIM,
            initializer=0.3,
            name="users",
            init_capacity=4096,
            kv_creator=creator,
            short_file_name=True,
            **options,
        )
        self.items = de.SquashedEmbedding(
            DIM, combiner="max", initializer=keras.initializers.Constant(-0.2), name="items"
        )
        self.fields = de.FieldWiseEmbedding(
            DIM,
            FIELDS,
            field,
            combiner="mean",
            initializer=0.1,
            restrict_policy=de.FrequencyRestrictPolicy,
            name="fields",
        )

    def rows(self, users, items):
        return [
            self.users(keys(users))[:, 0],
            self.items(keys(items)),
            tf2.reshape(self.fields(keys(items)), [-1, FIELDS * DIM]),
        ]


def data():
    """Returns users [n, 1], items [n, 4], with duplicates, and labels [n, 1] of all batches."""
    random, records = np.random.default_rng(5), BATCH * STEPS
    users = random.integers(0, USERS, (records, 1))
    items = random.integers(0, ITEMS, (records, 4))
    return (users, items), random.normal(size=(records, 1)).astype(np.float32)


def dataset(rank=0, size=1):
    every = tf2.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return every.map(lambda x, y: ((x[0][part], x[1][part]), y[part]))


def compare(model, plain):
    """Holds that rows, gathered from the ranks' exports, and other weights are plain Keras's."""
    for got, want in zip(model.mlp, plain.mlp):
        np.testing.assert_allclose(got.kernel, want.kernel, rtol=0, atol=1e-6)
    for name in ("users", "items", "fields"):
        rows = getattr(plain, name).embeddings.numpy()
        params = getattr(model, name).params
        own, values = params.export()
        ids = (own.numpy() - 2**40) // 7919
        np.testing.assert_allclose(values, rows[ids], rtol=0, atol=1e-6)
        count = reductions.allreduce(params.size(), op=process.Sum)
        first = {"users": data()[0][0]}.get(name, data()[0][1])
        assert int(count) == len(np.unique(first))


@pytest.mark.slow
def test_fit(strategy, rank, size, folder, capfd):
    """A checkpoint that its callback saved restores all."""
    plain = Plain()
    plain.compile(keras.optimizers.legacy.Adagrad(0.1), "mse")
    want = plain.fit(dataset(), epochs=2, verbose=0).history["loss"]

    def compiled():
        model = Tables(mpi_size=1)
        optimizer = keras.optimizers.legacy.Adagrad(0.1)
        model.compile(de.DynamicEmbeddingOptimizer(optimizer, synchronous=True), "mse")
        return model

    with strategy.scope():
        model = compiled()
        saved = de.DEHvdModelCheckpoint(
            os.path.join(folder, "epoch{epoch:03d}_loss{loss:.4f}"),
            options=tf2.saved_model.SaveOptions(namespace_whitelist=["TFRA"]),
        )
        callbacks = [de.DEHvdBroadcastGlobalVariablesCallback(root_rank=0), saved]
        got = model.fit(dataset(rank, size), epochs=2, verbose=0, callbacks=callbacks)
        np.testing.assert_allclose(got.history["loss"], want, rtol=1e-5)
        compare(model, plain)
        with pytest.raises(NotImplementedError, match="the table has .* here, and the limit"):
            model.fields.params.restrict(0)
        model.fields.params.restrict(4, trigger=ITEMS)
        again = compiled()
        again(next(iter(dataset(rank, size)))[0])
        Checkpoint(os.path.join(folder, f"epoch002_loss{want[1]:.4f}")).restore(again)
        compare(again, plain)
        de.de_save_model(again, os.path.join(folder, "whole"), options=None)
        assert tf2.train.latest_checkpoint(os.path.join(folder, "whole"))
        with pytest.raises(ValueError, match="has a checkpoint, and overwrite is False"):
            de.de_save_model(again, os.path.join(folder, "whole"), overwrite=False)
    said = capfd.readouterr().err
    # Rank 0 says it once in a process, in whichever test comes first.
    assert said.count("there makes steps of the sum") <= (size > 1 and rank == 0)


@pytest.mark.slow
def test_a_tape(strategy, rank, size):
    plain = Plain()

    def train_step(model, optimizer):
        @tf2.function
        def step(inputs, labels):
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_mean((model(inputs) - labels) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        return step

    step = train_step(plain, keras.optimizers.SGD(0.2))
    want = [float(step(*batch)) for batch in dataset()]
    with strategy.scope():
        model = Tables(de.BasicEmbedding)
        step = train_step(model, de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.2)))
        losses = []
        for batch in dataset(rank, size):
            losses.append(float(reductions.allreduce(step(*batch))))
        compare(model, plain)
        np.testing.assert_allclose(losses, want, rtol=1e-5)
        de.enable_inference_mode()

        @tf2.function
        def gradient(ids):
            with tf2.GradientTape() as tape:
                total = tf2.reduce_sum(model.mlp[0](tf2.tile(model.users(ids)[:, 0], [1, 5])))
            return tape.gradient(total, model.mlp[0].kernel)

        count = int(model.users.params.size())
        gradient(tf2.constant([[1], [2]], tf2.int64))
        assert int(model.users.params.size()) == count


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_what_a_layer_takes(strategy):
    ragged = tf2.ragged.constant([[5, 7], [], [5]], dtype=tf2.int64)
    with strategy.scope():
        layer = de.Embedding(2, initializer=1.5, name="a")
        assert layer.params.size() == 0 and layer.params.export()[1].shape == [0, 2]
        assert tf2.function(layer)(ragged).shape.as_list() == [3, None, 2]
        assert layer(np.zeros([2, 3, 4], np.int64)).shape == [2, 3, 4, 2]
        squashed = de.SquashedEmbedding(2, name="b")
        assert squashed(np.zeros([2, 3, 4], np.int64)).shape == [2, 2]
        assert squashed(np.arange(5)).shape == [2]
        again = de.SquashedEmbedding.from_config({**squashed.get_config(), "name": "c"})
        assert again.pooling == "sum" and again.key_dtype == tf2.int64
        with pytest.raises(ValueError, match="'a' has keys of int64, .* with ids of int32: cast"):
            layer(tf2.constant([1]))
        with pytest.raises(ValueError, match="'d' has combiner='most', and TensorFlow no"):
            de.SquashedEmbedding(2, combiner="most", name="d")
        with pytest.raises(ValueError, match="'sum', 'mean' or 'sqrt_n', not 'max'"):
            de.FieldWiseEmbedding(2, 3, field, combiner="max")
        outside = de.FieldWiseEmbedding(2, 2, field, name="e")
        with pytest.raises(tf2.errors.InvalidArgumentError, match="fields from 0 to 1"):
            outside(tf2.constant([[2]], tf2.int64))
        for refused in (
            {"max_norm": 1.0},
            {"distribute_strategy": "a"},
            {"value_dtype": tf2.float16},
        ):
            with pytest.raises(NotImplementedError, match="is not supported: "):
                de.Embedding(2, name="f", **refused)
        with pytest.raises(TypeError, match="Embedding has no argument 'max_nrom'"):
            de.Embedding(2, name="f", max_nrom=1.0)
        with pytest.raises(AttributeError, match="params.upsert is not supported: "):
            layer.params.upsert(1, 2)
        with pytest.raises(NotImplementedError, match="of object is not supported: give it an"):
            de.DynamicEmbeddingOptimizer(object())
        for signed in (
            lambda: de.de_save_model(None, "", signatures=1),
            lambda: de.DEHvdModelCheckpoint("x", signatures=1),
        ):
            with pytest.raises(NotImplementedError, match="export_saved_model"):
                signed()
        with pytest.raises(NotImplementedError, match="saves at the end of epochs"):
            de.DEHvdModelCheckpoint("x", save_freq=4)
    with pytest.raises(RuntimeError, match="start the script by `collective launch --as tfra`"):
        de.Embedding(2)
    refused = next(name for name in TFRA.names if name.theirs == "de.get_variable")
    with pytest.raises(NotImplementedError, match="its table has open keys"):
        refused.resolve()()
