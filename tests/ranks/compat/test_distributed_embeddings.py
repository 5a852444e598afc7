"""Names of distributed-embeddings train as plain Keras does in one process with the whole batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf2

from collective.compat.horovod_stand_in import process, reductions
from collective.compat.names.distributed_embeddings import DISTRIBUTED_EMBEDDINGS
from collective.tables.table import Sharded

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3)]
keras = tf2.keras
BATCH, STEPS = 12, 10
# Elements: 400, 120, 80 and 30.
SHAPES = [(50, 8), (30, 4), (20, 4), (10, 3)]
MAP = [0, 1, 2, 0, 3]
_random = np.random.default_rng(5)
ROWS = [_random.normal(0, 0.5, shape).astype(np.float32) for shape in SHAPES]


@pytest.fixture
def de():
    yield SimpleNamespace(**{n.attribute: n.resolve() for n in DISTRIBUTED_EMBEDDINGS.names})
    process.shutdown()


class Own(keras.layers.Layer):
    """A user's own embedding."""

    def __init__(self, input_dim, output_dim, **kwargs):
        super().__init__(**kwargs)
        self.shape_of_table = [input_dim, output_dim]

    def build(self, _):
        self.params = self.add_weight("params", shape=self.shape_of_table)

    def call(self, inputs):
        return tf2.gather(params=self.params, indices=inputs, axis=None)

    def get_config(self):
        rows, dim = self.shape_of_table
        return {"input_dim": rows, "output_dim": dim}


class Plain(keras.layers.Layer):
    """The same lookups in matrices."""

    def build(self, _):
        constant = keras.initializers.Constant
        self.matrices = [
            self.add_weight(f"m{i}", rows.shape, initializer=constant(rows))
            for i, rows in enumerate(ROWS)
        ]

    def call(self, inputs):
        users, words, tags, others, owns = inputs
        of_tags = tags.with_values(tf2.gather(self.matrices[2], tags.values))
        counts = tf2.cast(tf2.maximum(tags.row_lengths(), 1), tf2.float32)[:, None]
        return [
            tf2.gather(self.matrices[0], users),
            tf2.reduce_sum(tf2.gather(self.matrices[1], words), 1),
            tf2.reduce_sum(of_tags, 1) / counts,
            tf2.gather(self.matrices[0], others),
            tf2.gather(self.matrices[3], owns),
        ]


class Model(keras.Model):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings
        start = keras.initializers.GlorotUniform
        self.mlp = [
            keras.layers.Dense(units, activation, kernel_initializer=start(seed=units))
            for units, activation in ((8, "relu"), (1, None))
        ]

    def call(self, inputs):
        x = tf2.concat(self.embeddings(inputs), 1)
        for layer in self.mlp:
            x = layer(x)
        return x


def batches():
    """Returns the global batches: ids of the five inputs, some samples without tags; labels."""
    random = np.random.default_rng(7)
    found = []
    for _ in range(STEPS):
        lengths = random.integers(0, 4, BATCH)
        ids = [
            tf2.constant(random.integers(0, 50, BATCH), tf2.int32),
            tf2.constant(random.integers(0, 30, (BATCH, 3))),
            tf2.RaggedTensor.from_row_lengths(random.integers(0, 20, lengths.sum()), lengths),
            tf2.constant(random.integers(0, 50, BATCH)),
            tf2.constant(random.integers(0, 10, BATCH)),
        ]
        found.append((ids, tf2.constant(random.normal(size=(BATCH, 1)), tf2.float32)))
    return found


def own(batch, rank, size):
    """Returns this rank's samples and labels."""
    ids, labels = batch
    part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return [x[part] for x in ids], labels[part]


def given(layer, batch, rank, size):
    """Returns the inputs that a rank gives the layer, and its labels."""
    ids, labels = own(batch, rank, size)
    if not layer.dp_input:
        ids = [batch[0][number] for number in layer.strategy.input_ids_list[rank]]
    return ids, labels


def distributed(de, **options):
    (users, words, tags, owns), constant = SHAPES, keras.initializers.Constant
    layers = [
        keras.layers.Embedding(*users, constant(ROWS[0])),
        de.Embedding(*words, combiner="sum"),
        de.Embedding(*tags, combiner="mean"),
        Own(*owns),
    ]
    return de.DistributedEmbedding(
        layers,
        "memory_balanced",
        column_slice_threshold=100,
        row_slice_threshold=400,
        input_table_map=MAP,
        data_parallel_threshold=30,
        **options,
    )


def compare(layer, plain):
    for got, want in zip(layer.get_weights(all_ranks=True), plain.embeddings.matrices):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dp_input", [True, False])
def test_a_tape(strategy, rank, size, de, dp_input):
    plain, sgd = Model(Plain()), keras.optimizers.Adagrad(0.1)

    def train_step(model, optimizer, wrap):
        def step(ids, labels, is_first):
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_mean((model(ids) - labels) ** 2)
            gradients = wrap(tape).gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            if is_first and wrap is de.DistributedGradientTape:
                de.broadcast_variables(model.variables)
            return loss

        return tf2.function(step)

    step = train_step(plain, sgd, lambda tape: tape)
    want = [float(step(*batch, n == 0)) for n, batch in enumerate(batches())]
    with strategy.scope():
        model = Model(distributed(de, dp_input=dp_input))
        outs = model.embeddings(given(model.embeddings, batches()[0], rank, size)[0])  # eagerly
        assert [out.shape for out in outs] == [[BATCH // size, SHAPES[table][1]] for table in MAP]
        model.embeddings.set_weights(ROWS)
        step = train_step(model, keras.optimizers.Adagrad(0.1), de.DistributedGradientTape)
        losses = []
        for number, batch in enumerate(batches()):
            loss = step(*given(model.embeddings, batch, rank, size), number == 0)
            losses.append(float(reductions.allreduce(loss)))
        compare(model.embeddings, plain)
    np.testing.assert_allclose(losses, want, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_fit(strategy, rank, size, de):
    plain = Model(Plain())
    plain.compile(keras.optimizers.legacy.SGD(0.1), "mse")
    want = [plain.train_on_batch(*batch) for batch in batches()]
    with strategy.scope():
        model = Model(distributed(de))
        model(own(batches()[0], rank, size)[0])
        model.embeddings.set_weights(ROWS)
        model.compile(de.DistributedOptimizer(keras.optimizers.legacy.SGD(0.1)), "mse")
        parts = [own(batch, rank, size) for batch in batches()]
        arrays = (
            tuple(tf2.concat(x, 0) for x in zip(*(ids for ids, _ in parts))),
            tf2.concat([labels for _, labels in parts], 0),
        )
        dataset = tf2.data.Dataset.from_tensor_slices(arrays).batch(BATCH // size)
        callbacks = [de.BroadcastGlobalVariablesCallback(0)]
        got = model.fit(dataset, epochs=1, verbose=0, callbacks=callbacks)
        compare(model.embeddings, plain)
    np.testing.assert_allclose(got.history["loss"], [np.mean(want)], rtol=1e-5)


def test_weights_and_what_is_refused(strategy, rank, size, de, folder):
    whole = np.arange(18, dtype=np.float32).reshape(6, 3)
    ids = tf2.constant([[rank % 6], [5]])
    with strategy.scope():
        layer = de.DistributedEmbedding([keras.layers.Embedding(6, 3)])
        with pytest.raises(ValueError, match="1 array, and it has 0 tables: it isn't built yet"):
            layer.set_weights([whole])
        (out,) = layer([ids])
        assert out.shape == ([2, 3] if size > 1 else [2, 1, 3])  # as distributed-embeddings
        path = f"{folder}/{rank}.npy"
        np.save(path, whole)
        layer.set_weights([path])
        assert [x.tolist() for x in layer.get_weights()] == [whole.tolist()] * (rank == 0)
        np.testing.assert_array_equal(layer.get_weights(True)[0], whole)
        np.testing.assert_array_equal(tf2.reshape(layer([ids])[0], [2, 3]), whole[ids[:, 0]])
        with pytest.raises(ValueError, match=r"shape \[3, 6\], the table \[6, 3\]"):
            layer.set_weights([whole.T])
        with pytest.raises(ValueError, match="takes a list of 1 input, not 2"):
            layer([ids, ids])
        tables = [keras.layers.Embedding(6, 3), keras.layers.Embedding(4, 2)]
        layer = de.DistributedEmbedding(tables, dp_input=False, input_table_map=[1, 0, 1])
        assert layer.strategy.input_ids_list == [[1, 0, 2]] * size
        of_all = [tf2.zeros([n * size, 2], tf2.int64) for n in (2, 3, 4)]
        found = [tf2.reshape(out, [out.shape[0], -1]) for out in layer(of_all)]
        assert [out.shape for out in found] == [[3, 4], [2, 6], [4, 4]]
        summing = de.DistributedEmbedding([de.Embedding(6, 3, combiner="sum")], dp_input=False)
        sparse = tf2.sparse.from_dense(tf2.range(1, size + 1, dtype=tf2.int64)[:, None])
        (out,) = summing([sparse])
        np.testing.assert_array_equal(out, summing.get_weights(True)[0][rank + 1][None])
        if size > 1:
            odd = [tf2.ones([size + 1], tf2.int64)] * 3
            unknown = tf2.function(lambda *x: layer(list(x))).get_concrete_function(
                *(tf2.TensorSpec([None], tf2.int64) for _ in range(3))
            )
            for call in (lambda *x: layer(list(x)), unknown):
                with pytest.raises(tf2.errors.InvalidArgumentError, match=f"multiple of {size}"):
                    call(*odd)
        with pytest.raises(ValueError, match="Unsupported shard strategy 'other'"):
            de.DistributedEmbedding([keras.layers.Embedding(6, 3)], strategy="other")
        with pytest.raises(ValueError, match=r"input_table_map\[1\] is 1: tables are 0 to 0"):
            de.DistributedEmbedding([keras.layers.Embedding(6, 3)], input_table_map=[0, 1])
    with pytest.raises(RuntimeError, match="start the script by `collective launch --as"):
        de.DistributedEmbedding([keras.layers.Embedding(6, 3)])


def test_layers_of_their_own(strategy, size, de):
    """They are replicated, and take each kind of ids; `embedding_lookup` takes the same."""
    rows = ROWS[0]
    start = keras.initializers.Constant(rows)
    cube = np.arange(24).reshape(2, 3, 4)
    ragged = tf2.ragged.constant([[1, 2, 2], [], [7]], dtype=tf2.int64)
    combined = [rows[1] + 2 * rows[2], 0 * rows[0], rows[7]]
    means = [combined[0] / 3, combined[1], combined[2]]
    with strategy.scope():
        plain = de.Embedding(50, 8, start)
        summing, mean = (de.Embedding(50, 8, start, combiner=each) for each in ("sum", "mean"))
        np.testing.assert_array_equal(plain(cube[0, 0].astype(np.int8)), rows[cube[0, 0]])
        np.testing.assert_array_equal(plain(cube), rows[cube])
        np.testing.assert_array_equal(plain(ragged).to_list()[0], rows[[1, 2, 2]])
        np.testing.assert_allclose(summing(cube), rows[cube].sum(2), rtol=1e-5)
        for ids in (ragged, ragged.to_sparse()):
            np.testing.assert_allclose(mean(ids), means, rtol=1e-6)
            found = de.embedding_lookup(mean.embeddings, ids, "sum")
            np.testing.assert_allclose(found, combined, rtol=1e-6)
        assert not isinstance(plain.embeddings, Sharded)
        again = de.Embedding.from_config(mean.get_config())
        assert (again.input_dim, again.output_dim, again.combiner) == (50, 8, "mean")
        with pytest.raises(ValueError, match=r"has combiner='sum', and ids of the shape \(4,\)"):
            summing(cube[0, 0])
        concatenated = de.ConcatOneHotEmbedding([3, 4], 2)
        np.testing.assert_array_equal(
            concatenated(np.array([[2, 3], [0, 1]])),
            concatenated.params.numpy()[[[2, 6], [0, 4]]],
        )
    with pytest.raises(ValueError, match="'sum', 'mean' or None, not 'sqrtn'"):
        de.Embedding(50, 8, combiner="sqrtn")
    with pytest.raises(NotImplementedError, match="which has open keys"):
        de.IntegerLookup(10)
