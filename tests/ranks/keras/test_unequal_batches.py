"""Steps in which ranks have different numbers of records are those of one process."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.wrappers import keras_losses
from tests.ranks.keras.models import BATCH, USERS, compare, data, dataset, keras, make_model

pytestmark = [pytest.mark.either_backend, pytest.mark.double]

# Steps of a global batch, and a last one with one record for each of at most 12 ranks, and some.
RECORDS = 3 * BATCH + 17
MASKED = np.random.default_rng(5).integers(0, 4, (RECORDS, 3))
LABELS = np.random.default_rng(6).normal(0, 1, (RECORDS, 3, 1)).astype(np.float32)


def unequal(x, rank, size):
    """Returns a rank's records and its batch sizes: of each global batch, rank 0 has the most."""
    parts, sizes = [], []
    for first in range(0, RECORDS, BATCH):
        ends = np.linspace(0, 1, size + 1) ** 0.7 * len(x[first : first + BATCH])
        own = x[first : first + BATCH][int(ends[rank]) : int(ends[rank + 1])]
        parts.append(own)
        sizes.append(len(own))
    return np.concatenate(parts), sizes


def batches(arrays, rank, size):
    """Returns a rank's dataset; on one rank, of global batches."""
    sizes = unequal(np.arange(RECORDS), rank, size)[1]
    own = tf.nest.map_structure(lambda x: unequal(x, rank, size)[0], arrays)
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    numbered = dataset((numbers, own), 1).unbatch()
    grouped = numbered.group_by_window(
        lambda number, _: number,
        lambda _, batch: batch.map(lambda _, record: record).batch(BATCH),
        BATCH,
    )
    return grouped.apply(tf.data.experimental.assert_cardinality(len(sizes)))


def mean_and_regularizer(scope):
    model = make_model(scope)
    start = keras.initializers.Constant(0.3)
    mean = keras.layers.Dense(1, None, True, start, kernel_regularizer="l2")(model.output)
    (users, words), labels = data(RECORDS)
    return keras.Model(model.inputs, mean), "mse", ((users, words), labels)


def sum_and_mean(scope):
    model, _, (inputs, labels) = mean_and_regularizer(scope)
    added_up = keras.layers.Activation("linear")(model.layers[-2].output)
    losses = [keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum"), "mse"]
    return (
        keras.Model(model.inputs, [added_up, model.output]),
        losses,
        (inputs, (labels, labels), (labels + 0.5, labels + 1)),
    )


def samples(scope):
    model, _, all_data = mean_and_regularizer(scope)
    loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    return keras.Model(model.inputs, model.layers[-2].output), loss, all_data


def masked(scope):
    start = keras.initializers.Constant(np.arange(8).reshape(4, 2) / 10)
    with scope():
        rows = keras.layers.Embedding(4, 2, start, mask_zero=True, input_length=3)
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    return keras.Sequential([rows, dense]), keras.losses.MeanSquaredError(), (MASKED, LABELS)


def trained(made, scope, rank, size, **options):
    """Returns a model, and what `fit` and `evaluate` log."""
    model, losses, all_data = made(scope)
    model.compile(keras.optimizers.legacy.SGD(0.02), losses, **options)
    own = batches(all_data, rank, size)
    fitted = model.fit(own, epochs=2, verbose=0)
    evaluated = model.evaluate(own, verbose=0)
    return model, [*(x for values in fitted.history.values() for x in values), *np.ravel(evaluated)]


@pytest.mark.parametrize(
    "made",
    [
        mean_and_regularizer,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (sum_and_mean, samples, masked)),
    ],
)
@pytest.mark.parametrize(
    "eagerly", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["function", "eager"]
)
def test_fit_with_batches_of_different_size(strategy, rank, size, made, eagerly):
    plain, want = trained(made, contextlib.nullcontext, 0, 1)
    with strategy.scope():
        options = {"run_eagerly": True} if eagerly else {}
        model, got = trained(made, strategy.embedding_scope, rank, size, **options)
        compare(model, plain, rank, size)
    if made is not samples:  # Keras weighs what it logs of them by the square of a batch's size.
        np.testing.assert_allclose(got, want, rtol=1e-6)


class Twice(keras.Model):
    """Takes the losses of two batches in a step, the second in a function of its own."""

    def train_step(self, data):
        (first, first_labels), (second, second_labels) = data

        @tf2.function
        def loss_of_second():
            return self.compiled_loss(second_labels, self(second))

        with tf2.GradientTape() as tape:
            loss = self.compiled_loss(first_labels, self(first)) + loss_of_second()
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


class Taught(keras.Model):
    """Has a target that comes from a table."""

    def train_step(self, data):
        inputs, _ = data
        with tf2.GradientTape() as tape:
            table = next(x for x in self.layers if getattr(x, "input_dim", 0) == USERS)
            target = table(inputs[0])[:, :1]
            loss = self.compiled_loss(tf2.stop_gradient(target), self(inputs))
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [Twice, pytest.param(Taught, marks=pytest.mark.slow)])
def test_a_step_of_ones_own(strategy, rank, size, kind):
    """Each loss counts by the records of its own batch."""

    def fitted(scope, rank, size):
        inner, losses, all_data = mean_and_regularizer(scope)
        model = kind(inner.inputs, inner.outputs)
        model.compile(keras.optimizers.SGD(0.02), losses)
        own = batches(all_data, rank, size)
        if kind is Twice:
            own = tf2.data.Dataset.zip((own.skip(2).take(1), own.skip(3)))
        return model, model.fit(own, verbose=0).history["loss"]

    plain, want = fitted(contextlib.nullcontext, 0, 1)
    with strategy.scope():
        model, got = fitted(strategy.embedding_scope, rank, size)
        compare(model, plain, rank, size)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.slow
def test_models_without_tables_labels_or_a_first_step_here(strategy, rank, size):
    """A sum is evaluated, a loss added to a model without labels, a model used before scope()."""
    (users, words), labels = data(RECORDS)
    x = np.stack([users, *words.T], 1).astype(np.float32) / 30

    def dense(reduction="sum", before=None):
        out = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input([4]), out])
        model.compile(keras.optimizers.SGD(1e-4), keras.losses.MeanSquaredError(reduction))
        if before is not None:
            model.train_on_batch(x[:before], labels[:before])
        return model

    def unlabelled():
        inputs = keras.Input([4])
        model = keras.Model(inputs, keras.layers.Dense(4, kernel_initializer="ones")(inputs))
        model.add_loss(tf2.reduce_mean((model.output - inputs) ** 2))
        model.compile(keras.optimizers.SGD(0.02))
        return model

    def fitted(model, arrays, rank, size):
        own = batches(arrays, rank, size)
        logs = model.fit(own, verbose=0).history["loss"]
        evaluated = [] if len(arrays) == 1 else [model.evaluate(own, verbose=0)]
        return [*logs, *evaluated], model.get_weights()

    for make, arrays in (
        (dense, (x, labels)),
        (lambda: dense("auto"), (x, labels)),
        (lambda: dense(before=8), (x, labels)),
        (unlabelled, (x,)),
    ):
        want, weights = fitted(make(), arrays, 0, 1)
        used_before = make()
        with strategy.scope():
            got, own = fitted(used_before, arrays, rank, size)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        for each, plain in zip(own, weights):
            np.testing.assert_allclose(each, plain, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_one_rank_alone_may_take_a_gradient(strategy, rank, size):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile("sgd", "mse")

        @tf2.function
        def gradient(x):
            with tf2.GradientTape() as tape:
                tape.watch(x)
                loss = model.compiled_loss(tf2.zeros([2, 1]), model(x))
            return tape.gradient(loss, x)

        if rank == size - 1:
            got = gradient(tf2.constant([[1.0], [3.0]]))
            np.testing.assert_allclose(got, [[1.0], [3.0]], rtol=1e-6)


class Looping(keras.Model):
    """Computes its loss in a loop."""

    def train_step(self, data):
        x, y = data
        with tf2.GradientTape() as tape:
            _, loss = tf2.while_loop(
                lambda turn, _: turn < 1,
                lambda turn, loss: (turn + 1, loss + self.compiled_loss(y, self(x))),
                [0, 0.0],
            )
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


@pytest.mark.slow
def test_a_loss_in_a_loop_is_warned_of(strategy, rank, size, monkeypatch):
    said = []
    monkeypatch.setattr(tf.logging, "warning", lambda text, *_: said.append(text))
    keras_losses._warn.cache_clear()
    with strategy.scope():
        inputs = keras.Input([1])
        model = Looping(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        model.fit(tf2.zeros([4, 1]), tf2.zeros([4, 1]), batch_size=2, verbose=0)
    assert sum("counts alike" in text for text in said) == (size > 1 and rank == 0), said


@pytest.mark.slow
@pytest.mark.parametrize("made", [mean_and_regularizer, sum_and_mean, masked])
def test_fit_in_a_graph_with_batches_of_different_size(strategy, rank, size, made):
    def in_graph(*args):
        with tf.Graph().as_default():
            model, logs = trained(made, *args)
            return model.get_weights(), logs

    weights, want = in_graph(contextlib.nullcontext, 0, 1)
    with strategy.scope(plan="quiet"):
        own, got = in_graph(strategy.embedding_scope, rank, size)
    for each, plain in zip(own, weights):
        plain = plain if each.shape == plain.shape else plain[rank::size]
        np.testing.assert_allclose(each, plain, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_an_evaluation_in_a_graph_ends_with_the_last_rank(strategy, rank, size):
    """A rank that is out of data answers the others, and has no records."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        inputs = keras.Input([], dtype="int64")
        with strategy.embedding_scope():
            rows = keras.layers.Embedding(10, 2, "zeros")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse", metrics=["mae"])
        count = 9 if rank == 0 else 5
        own = dataset((np.arange(count), np.ones([count, 1], np.float32)), 2)
        np.testing.assert_allclose(model.evaluate(own, verbose=0), [1, 1], rtol=1e-6)
