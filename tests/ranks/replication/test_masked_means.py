"""Means over what counts of a batch are over what counts of all ranks' batches."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.ops.communication.horovod_library import hvd
from collective.wrappers import masked_means
from tests.ranks.keras.models import BATCH, compare, dataset, keras, part

pytestmark = [pytest.mark.either_backend, pytest.mark.double]

STEPS = 4
# The first of a batch count at one place, the last at all three: ranks have different numbers.
COUNTS = np.tile(np.arange(BATCH)[:, None] >= [0, BATCH // 2, BATCH - 3], [STEPS, 1])
_random = np.random.default_rng(7)
IDS = _random.integers(1, 9, COUNTS.shape) * COUNTS
LABELS = _random.normal(0, 1, [*COUNTS.shape, 1]).astype(np.float32)
LOSSES = [
    "absolute_difference",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("mean_squared_error", "sigmoid_cross_entropy", "huber_loss")
    ),
]
HOW = pytest.mark.parametrize(
    "eagerly", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["function", "eager"]
)


@pytest.fixture
def said(monkeypatch):
    texts = []
    monkeypatch.setattr(tf.logging, "warning", lambda text, *_: texts.append(text))
    masked_means._warn.cache_clear()
    yield texts
    masked_means._warn.cache_clear()


def own_numbers(said):
    return [text for text in said if "divides by its own number" in text]


def make(embedding_scope, reduction="auto", eagerly=False):
    start = keras.initializers.Constant(np.arange(18).reshape(9, 2) / 10)
    with embedding_scope():
        rows = keras.layers.Embedding(9, 2, start, mask_zero=True, input_length=3)
    model = keras.Sequential([rows, keras.layers.Dense(1, kernel_initializer="ones")])
    loss = keras.losses.MeanSquaredError(reduction)
    model.compile(keras.optimizers.Adagrad(0.05), loss, run_eagerly=eagerly)
    return model


def trained(model, arrays, batch):
    """Returns the losses that `fit` and `evaluate` log."""
    fitted = model.fit(*arrays, batch_size=batch, shuffle=False, epochs=2, verbose=0)
    evaluated = model.evaluate(dataset(arrays, batch), verbose=0)
    return [*fitted.history["loss"], evaluated]


def count_only_some(first, last):
    """Returns (ids, labels) of `BATCH * STEPS` records of which none counts but a few."""
    ids = np.zeros_like(IDS)
    ids[first:last] = IDS[first:last]
    ids[::BATCH, 0] = 1  # of each batch, lest one process divide by 0
    return ids, LABELS


@HOW
def test_a_keras_loss_with_a_mask(strategy, rank, size, said, eagerly):
    plain = make(contextlib.nullcontext)
    want = trained(plain, (IDS, LABELS), BATCH)
    with strategy.scope():
        model = make(strategy.embedding_scope, eagerly=eagerly)
        got = trained(model, part((IDS, LABELS), rank, size), BATCH // size)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        compare(model, plain, rank, size)
    assert not own_numbers(said)


@pytest.mark.slow
def test_a_rank_of_which_nothing_counts(strategy, rank, size):
    arrays = count_only_some(0, 3)
    plain = make(contextlib.nullcontext)
    want = trained(plain, arrays, BATCH)
    with strategy.scope():
        model = make(strategy.embedding_scope)
        got = trained(model, part(arrays, rank, size), BATCH // size)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        compare(model, plain, rank, size)


def uneven(rank):
    """Returns a rank's batches: it has one more than the rank before, and the last is shorter."""
    step = BATCH // 6
    places = [
        range((turn * 3 + rank) * step, (turn * 3 + rank + 1) * step) for turn in range(rank + 1)
    ]
    places[-1] = places[-1][: step - rank]
    return [(IDS[place], LABELS[place]) for place in places]


def of_all(evaluate, size):
    """Returns the mean of losses over the records that ranks have at the same time."""
    total = records = 0.0
    for turn in range(size):
        together = [uneven(rank)[turn] for rank in range(turn, size)]
        ids, labels = (np.concatenate(each) for each in zip(*together))
        total, records = total + evaluate(ids, labels) * len(ids), records + len(ids)
    return total / records


@HOW
def test_an_evaluation_of_unequal_length(strategy, rank, size, eagerly):
    plain = make(contextlib.nullcontext)
    want = of_all(lambda *data: plain.evaluate(*data, batch_size=BATCH, verbose=0), size)
    with strategy.scope():
        model = make(strategy.embedding_scope, eagerly=eagerly)
        data = tf2.data.Dataset.from_tensor_slices(
            tuple(np.concatenate(each) for each in zip(*uneven(rank)))
        ).batch(BATCH // 6)
        got = model.evaluate(data, verbose=0)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_an_evaluation_of_unequal_length_in_a_graph(strategy, rank, size):
    """Batches that ranks have at the same time are as large."""

    def evaluated(scope, *data, batch):
        with tf.Graph().as_default():
            model = make(scope)
            model.compile(keras.optimizers.legacy.SGD(0.1), keras.losses.MeanSquaredError())
            arrays = tf.data.Dataset.from_tensor_slices(data).batch(batch)
            return model.evaluate(arrays, verbose=0)

    # In a graph Keras takes the mean of the batches' losses.
    want = np.mean(
        [
            evaluated(contextlib.nullcontext, IDS[at : at + n], LABELS[at : at + n], batch=BATCH)
            for at, n in ((0, 6 * size), (24, 6))
        ]
    )
    with strategy.scope(plan="quiet"):
        places = [*range(rank * 6, rank * 6 + 6), *(range(24, 30) if rank == 0 else ())]
        got = evaluated(strategy.embedding_scope, IDS[places], LABELS[places], batch=6)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_function_without_tables_may_be_called_by_one_rank(strategy, rank, size):
    mask = keras.layers.Masking()
    loss = keras.losses.MeanSquaredError()

    @tf2.function
    def evaluate(x):
        return loss(tf2.zeros([2, 3, 1]), mask(x))

    with strategy.scope():
        if rank == 0:
            x = np.array([[[1], [0], [0]], [[2], [3], [0]]], np.float32)
            np.testing.assert_allclose(evaluate(x), 14 / 3, rtol=1e-6)


@pytest.mark.parametrize("how", ["function", "branch"])
def test_a_loss_with_weights_in_a_function_of_a_graph_is_warned_of(strategy, rank, size, said, how):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        v = tf.get_variable("v", [4], initializer=tf.ones_initializer())

        def loss():
            return tf.losses.absolute_difference(v, 3 * v, tf.cast(v > 0, tf.float32))

        if how == "branch":
            value = tf.cond(tf.placeholder_with_default(True, []), loss, lambda: tf.reduce_sum(v))
        else:
            value = tf2.function(loss)()
        step = tf.train.GradientDescentOptimizer(0.5).minimize(value)
        with tf.train.MonitoredTrainingSession() as session:
            session.run(step)
            np.testing.assert_allclose(session.run(v), np.full([4], 0.75))
    assert len(own_numbers(said)) == (size > 1 and rank == 0), said


def test_a_keras_loss_in_a_graph(strategy, rank, size):
    def fitted(embedding_scope, arrays, batch):
        with tf.Graph().as_default():
            model = make(embedding_scope)
            model.compile(keras.optimizers.legacy.SGD(0.1), keras.losses.MeanSquaredError())
            return trained(model, arrays, batch), model.get_weights()[1:]

    want, weights = fitted(contextlib.nullcontext, (IDS, LABELS), BATCH)
    with strategy.scope(plan="quiet"):
        got, own = fitted(strategy.embedding_scope, part((IDS, LABELS), rank, size), BATCH // size)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for each, plain in zip(own, weights):
        np.testing.assert_allclose(each, plain, atol=1e-6)


def test_a_loss_in_a_function_of_ones_own(strategy, rank, size, said):
    """Also in a function that another one calls, which becomes a part of it."""

    def steps(embedding_scope, arrays, batch):
        model = make(embedding_scope)
        optimizer, loss_object = keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError()

        @tf2.function
        def loss_of(labels, predictions):
            return loss_object(labels, predictions)

        @tf2.function
        def step(ids, labels):
            with tf2.GradientTape() as tape:
                loss = loss_of(labels, model(ids))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        for ids, labels in dataset(arrays, batch):
            step(ids, labels)
        return model

    plain = steps(contextlib.nullcontext, (IDS, LABELS), BATCH)
    with strategy.scope():
        model = steps(strategy.embedding_scope, part((IDS, LABELS), rank, size), BATCH // size)
        compare(model, plain, rank, size)
    assert not own_numbers(said)


def test_a_loss_in_a_loop_is_warned_of(strategy, rank, size, said):
    loss = keras.losses.MeanSquaredError()

    @tf2.function
    def total(predictions, labels):
        result = 0.0
        for _ in tf2.range(2):
            predictions._keras_mask = predictions[:, 0] > 0
            result += loss(labels, predictions)
        return result

    with strategy.scope(), tf2.GradientTape():
        total(tf2.ones([4, 1]), tf2.zeros([4, 1]))
    assert len(own_numbers(said)) == (size > 1 and rank == 0), said


@pytest.mark.parametrize("reduction", [None, tf.losses.Reduction.MEAN], ids=["nonzero", "mean"])
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("is_taped", [False, True])
def test_a_loss_with_weights(strategy, rank, size, kind, reduction, is_taped):
    """Also with weights that are learned: the gradient through what it is divided by."""
    options = {} if reduction is None else {"reduction": reduction}

    def steps(scope, arrays):
        with tf.Graph().as_default():
            with scope():
                table = tf.get_variable("t", [9, 2], initializer=tf.ones_initializer())
            factor = tf.get_variable("f", [], initializer=tf.ones_initializer())
            ids, labels = (tf.placeholder(x.dtype, [None, *x.shape[1:]]) for x in arrays)

            def loss():
                rows = tf.reduce_sum(tf.nn.embedding_lookup(table, ids), -1, keepdims=True)
                weights = tf.cast(ids > 0, tf.float32)[..., tf.newaxis] * factor
                return getattr(tf.losses, kind)(labels, rows * factor, weights, **options)

            # A tape takes the gradients of a function.
            step = tf.train.AdagradOptimizer(0.1).minimize(loss if is_taped else loss())
            everything = tf.nn.embedding_lookup(table, tf.range(9))
            with tf.train.MonitoredTrainingSession() as session:
                for number in range(STEPS):
                    fed = [x.reshape(STEPS, -1, *x.shape[1:])[number] for x in arrays]
                    session.run(step, dict(zip((ids, labels), fed)))
                return session.run([factor, everything])

    arrays = IDS, np.abs(LABELS)
    want = steps(contextlib.nullcontext, arrays)
    with strategy.scope(plan="quiet"):
        got = steps(strategy.embedding_scope, part(arrays, rank, size))
    for each, plain in zip(got, want):
        np.testing.assert_allclose(each, plain, atol=2e-6)


def test_a_loss_with_weights_adds_no_operation(strategy):
    """Random operations without a seed are numbered by those before them."""

    def made():
        x, weights = (tf.placeholder(tf.float32, [None]) for _ in range(2))
        before = len(tf.get_default_graph().get_operations())
        tf.losses.absolute_difference(x, 2 * x, weights)
        return len(tf.get_default_graph().get_operations()) - before

    with tf.Graph().as_default():
        want = made()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        assert made() == want


def test_one_rank_alone_may_fetch_a_loss_with_weights(strategy, rank):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        v = tf.get_variable("v", [4], initializer=tf.ones_initializer())
        loss = tf.losses.absolute_difference(v, 2 * v, tf.cast(v + rank > 1, tf.float32))
        step = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.train.MonitoredTrainingSession() as session:
            session.run(step)
            if rank == 0:
                session.run(loss)
            session.run(step)


def test_a_loss_of_which_the_weights_are_a_number(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        for weights in (1.0, 2, np.float32(0.5), tf.constant(0.5)):
            loss = tf.losses.absolute_difference(x, 2 * x, weights)
            tf.gradients(loss, x)
        names = [op.name for op in tf.get_default_graph().get_operations()]
        assert not [name for name in names if "gradient_of_tf" in name], names


def test_a_loss_with_weights_in_a_function(strategy, rank, size):
    values, counts = np.arange(12, dtype=np.float32), np.arange(12) > 4
    own = slice(12 * rank // size, 12 * (rank + 1) // size)
    v = tf2.Variable(2.0)

    @tf2.function
    def gradient(x, weights):
        with tf2.GradientTape() as tape:
            loss = tf.losses.mean_squared_error(x * 0 + 3, v * x, weights)
        return tape.gradient(loss, v)

    want = 2 * np.sum((2 * values - 3) * values * counts) / counts.sum()
    with strategy.scope():
        got = gradient(tf2.constant(values[own]), tf2.constant(counts[own], tf2.float32))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)


def test_a_sum_divided_by_the_mean_of_numbers_is_that_of_one_process(strategy, rank, size):
    values = np.arange(12, dtype=np.float32)
    counts = (values > 4).astype(np.float32)

    def gradient(x, weights, of_all_ranks):
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        total = tf.reduce_sum(tf.square(w * x - 3) * weights)
        (found,) = tf.gradients(total / of_all_ranks(tf.reduce_sum(weights)), [w])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return session.run(found)

    with tf.Graph().as_default():
        want = gradient(values, counts, lambda number: number)
    own = slice(12 * rank // size, 12 * (rank + 1) // size)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        mean = hvd.allreduce if size > 1 else lambda number: number
        got = gradient(values[own], counts[own], mean)
    np.testing.assert_allclose(got, want, rtol=1e-6)
