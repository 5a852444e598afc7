"""`fit`, `evaluate` and `predict` of eager Keras models equal plain Keras in one process."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf2

from tests.ranks.keras.models import (
    BATCH,
    STEPS,
    USER_ROWS,
    USERS,
    WORD_ROWS,
    WORDS,
    compare,
    data,
    dataset,
    keras,
    loss_of,
    make_model,
    part,
    weights_of,
)

pytestmark = pytest.mark.double


def compiled(model, optimizer="adagrad", **options):
    model.compile(
        optimizer,
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(50, from_logits=True, name="auc"), "mae"],
        **options,
    )
    return model


def held_out(rank=0, size=1, records=100):
    """Returns what a rank evaluates: rank 0 has more than the others, each record once."""
    inputs, labels = data(records, seed=1)
    cuts = [0, *(records // 2 + records // 4 * r // size for r in range(size)), records]
    first, last = (cuts[rank], cuts[rank + 1]) if size > 1 else (0, records)
    if rank == size - 1:
        last = records
    return tf2.nest.map_structure(lambda x: x[first:last], (inputs, labels))


class Stop(keras.callbacks.Callback):
    """Wants to stop after an epoch; keeps the logs."""

    def __init__(self, epoch=None):
        super().__init__()
        self.epoch, self.logs = epoch, []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))
        if epoch == self.epoch:
            self.model.stop_training = True


def same_logs(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    "unknown, executions, optimizer",
    [
        (False, None, "adagrad"),
        pytest.param(True, None, "adam", marks=pytest.mark.matrix),
        pytest.param(False, 7, "sgd", marks=pytest.mark.matrix),
    ],
)
def test_fit_equals_one_process(strategy, rank, size, unknown, executions, optimizer):
    """Weights, losses, metrics; ranks have other numbers of records to evaluate."""
    plain, all_data = compiled(make_model(), optimizer), data()
    plain_history = plain.fit(
        dataset(all_data, BATCH),
        epochs=2,
        verbose=0,
        validation_data=dataset(held_out(), 10),
    )
    want = plain.evaluate(dataset(held_out(), 10), verbose=0, return_dict=True)
    with strategy.scope():
        model = compiled(
            make_model(strategy.embedding_scope), optimizer, steps_per_execution=executions
        )
        own = dataset(part(all_data, rank, size), BATCH // size)
        own = own.filter(lambda *_: True) if unknown else own
        if executions:  # Keras has to know how many batches there are then.
            evaluated, steps = dataset(part(held_out(records=96), rank, size), 8), 12 // size
            del steps
            history = model.fit(own, epochs=2, verbose=0)
            compare(model, plain, rank, size)
            assert len(model.predict(evaluated, verbose=0)) == 96 // size
            return
        mine = dataset(held_out(rank, size), 10)
        stop = Stop()
        history = model.fit(own, epochs=2, verbose=0, validation_data=mine, callbacks=[stop])
        got = model.evaluate(mine, verbose=0, return_dict=True)
        predicted = model.predict(mine, verbose=0)
    compare(model, plain, rank, size)
    same_logs(history.history, plain_history.history)
    same_logs(stop.logs[-1], {name: x[-1] for name, x in plain_history.history.items()})
    same_logs(got, want)
    (users, words), _ = held_out(rank, size)
    alone = plain.predict([users, words], verbose=0)
    np.testing.assert_allclose(predicted, alone, rtol=0, atol=1e-6)
    assert int(model.optimizer.iterations.numpy()) == 2 * STEPS


@pytest.mark.slow
def test_ranks_end_and_stop_together(strategy, rank, size):
    """Unequal data, known or not; one rank's wish to stop; replicas stay equal."""
    for unknown in (False, True):
        with strategy.scope():
            model = compiled(make_model(strategy.embedding_scope), "adam")
            mine = part(data(), rank, size)
            own = dataset(mine, BATCH // size).take(STEPS - 3 * rank)
            own = own.filter(lambda *_: True) if unknown else own
            stop = Stop(1 if rank == size - 1 else None)
            history = model.fit(own, epochs=4, verbose=0, callbacks=[stop])
        assert len(history.history["loss"]) == 2
        steps = int(model.optimizer.iterations.numpy())
        assert steps == 2 * (STEPS - 3 * (size - 1))


class OwnStep(keras.Model):
    """Has a step of its own, which returns something that is no metric."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.total = inner, keras.metrics.Mean(name="total")
        self.of_last = keras.metrics.Mean(name="of_last")

    def call(self, inputs, training=None):
        return self.inner(inputs)

    @property
    def metrics(self):
        return [self.total, self.of_last]

    def train_step(self, data):
        (users, words), labels = data
        with tf2.GradientTape() as tape:
            loss = loss_of(self.inner, users, words, labels)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.total.update_state(labels)
        self.of_last.update_state(loss)
        return {"total": self.total.result(), "own": loss, "of_last": loss}


@pytest.mark.slow
def test_a_train_step_of_ones_own(strategy, rank, size):
    """Its metrics are of all ranks, other logs the mean over ranks, by whatever names."""
    all_data = data()
    plain = OwnStep(make_model())
    plain.compile(keras.optimizers.SGD(0.1))
    want = plain.fit(dataset(all_data, BATCH), verbose=0)
    with strategy.scope():
        model = OwnStep(make_model(strategy.embedding_scope))
        model.compile(keras.optimizers.SGD(0.1))
        got = model.fit(dataset(part(all_data, rank, size), BATCH // size), verbose=0)
    compare(model.inner, plain.inner, rank, size)
    same_logs(got.history, want.history)


class Lookups(keras.Model):
    """Looks a table up in all ways, sparse ones with weights, and regularises it."""

    def __init__(self, embedding_scope):
        super().__init__()
        with embedding_scope():
            self.words = keras.layers.Embedding(
                WORDS, 4, keras.initializers.Constant(WORD_ROWS), embeddings_regularizer="l2"
            )
            self.words.build([None])
            # Plain Keras calls the weights of both 'embeddings'.
            self.kinds = keras.layers.Embedding(3, 4, keras.initializers.Constant(0.2))
            self.kinds.build([None])
        self.norm = keras.layers.BatchNormalization()

    def call(self, inputs, training=None):
        users, words = inputs
        table, bags = self.words.embeddings, tf2.sparse.from_dense(words)
        filled = tf2.sparse.fill_empty_rows(bags, tf2.constant(1, tf2.int64))[0]
        weights = tf2.cast(filled.values, tf2.float32) / WORDS
        weights = tf2.SparseTensor(filled.indices, weights, filled.dense_shape)
        rows = tf2.nn.embedding_lookup_sparse(table, filled, weights, combiner="mean")
        rows += tf2.nn.safe_embedding_lookup_sparse(table, bags, combiner="sqrtn")
        rows += tf2.gather(table, users % WORDS) + self.words(users % 3) + self.kinds(users % 3)
        # Its values are no longer used: each rank normalises by its own batch.
        self.norm(tf2.stop_gradient(rows), training=training)
        return tf2.reduce_sum(rows, 1, keepdims=True)


@pytest.mark.slow
@pytest.mark.either_backend
def test_every_kind_of_lookup_and_averages_of_layers(strategy, rank, size):
    all_data = data(BATCH * 5)
    plain = Lookups(contextlib.nullcontext)
    plain.compile("adagrad", "mse")
    want = plain.fit(dataset(all_data, BATCH), epochs=2, verbose=0)
    with strategy.scope():
        model = Lookups(strategy.embedding_scope)
        model.compile("adagrad", "mse")
        own = dataset(part(all_data, rank, size), BATCH // size)
        got = model.fit(own, epochs=2, verbose=0)
        # Ranks that are out of data answer the others, also of the regularizer's squares.
        evaluated = model.evaluate(own.take(1 + rank), verbose=0)
    compare(model, plain, rank, size)
    same_logs(got.history, want.history)
    parts = [
        tf2.nest.map_structure(
            lambda x, r=r: x[: (1 + r) * (BATCH // size)], part(all_data, r, size)
        )
        for r in range(size)
    ]
    of_all = tf2.nest.map_structure(lambda *x: np.concatenate(x), *parts)
    np.testing.assert_allclose(
        evaluated, plain.evaluate(dataset(of_all, BATCH), verbose=0), rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(
        model.norm.moving_mean.numpy(), plain.norm.moving_mean.numpy(), rtol=0, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_adds_up_samples(strategy, rank, size, reduction):
    """Each sample counts as much as in one process, next to a mean and a regularizer."""

    (users, words), labels = data()
    all_data = ((users, words), labels, labels + 0.5)
    if reduction == "sum":  # Keras adds a loss of each sample to no others.
        all_data = ((users, words), (labels, labels), (labels + 0.5, labels + 1))

    def made(embedding_scope=contextlib.nullcontext):
        inner = make_model(embedding_scope)
        start = keras.initializers.Constant(0.3)
        added_up = keras.layers.Activation("linear", name="added_up")(inner.output)
        mean = keras.layers.Dense(1, None, True, start, kernel_regularizer="l2", name="mean")
        loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction)
        outputs, losses = added_up, loss
        if reduction == "sum":
            outputs, losses = [added_up, mean(inner.output)], [loss, "mse"]
        model = keras.Model(inner.inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), losses)
        return model

    plain = made()
    want = plain.fit(dataset(all_data, BATCH), verbose=0, validation_data=dataset(all_data, BATCH))
    with strategy.scope():
        model = made(strategy.embedding_scope)
        own = dataset(part(all_data, rank, size), BATCH // size)
        got = model.fit(own, verbose=0, validation_data=own)
    compare(model, plain, rank, size)
    assert got.history.keys() == want.history.keys()
    for name, values in want.history.items():
        np.testing.assert_allclose(got.history[name], values, rtol=1e-6, err_msg=name)


class Sorted(keras.constraints.Constraint):
    """Sorts each row, which is a constraint of single rows that Keras doesn't have."""

    def __call__(self, w):
        return tf2.sort(w, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["NonNeg", "MaxNorm", "UnitNorm", "MinMaxNorm", "Sorted", "axis 0"]
)
def test_constraints_of_tables(strategy, rank, size, name):
    """They hold if they are of single rows; others, as Keras's norms of columns, are refused."""

    def constraint():
        by_name = {"Sorted": Sorted(), "axis 0": keras.constraints.MaxNorm(0.9)}
        options = {} if name == "NonNeg" else {"axis": 1}
        return by_name.get(name) or getattr(keras.constraints, name)(**options)

    def made(embedding_scope=contextlib.nullcontext, **placement):
        with embedding_scope(**placement):
            start = keras.initializers.Constant(3 * USER_ROWS)
            users = keras.layers.Embedding(USERS, 8, start, embeddings_constraint=constraint())
            model = keras.Sequential([users])
            model.build([None])
        model.compile("adam", "mse")
        return model

    (users, _), labels = data()
    all_data = (users, np.repeat(labels[:, None], 8, 1))
    plain = made()
    plain.fit(dataset(all_data, BATCH), verbose=0)
    with strategy.scope():
        own = dataset(part(all_data, rank, size), BATCH // size)
        if name == "axis 0" and size > 1:
            with pytest.raises(NotImplementedError, match="MaxNorm .* treats rows together"):
                made(strategy.embedding_scope).fit(own, verbose=0)
            model = made(strategy.embedding_scope, placement="whole")
            model.fit(own, verbose=0)
            np.testing.assert_allclose(
                model.get_weights()[0], plain.get_weights()[0], rtol=0, atol=1e-6
            )
            return
        model = made(strategy.embedding_scope)
        model.fit(own, verbose=0)
    compare(model, plain, rank, size)


@pytest.mark.slow
def test_weights_are_those_of_whole_tables(strategy, rank, size):
    """Also after training; what one model has, another one gets."""
    all_data = data()
    with strategy.scope():
        model = compiled(make_model(strategy.embedding_scope))
        model.fit(dataset(part(all_data, rank, size), BATCH // size), verbose=0)
        weights = model.get_weights()
        other = make_model(strategy.embedding_scope)
        other.set_weights(weights)
        for own, copied in zip(weights_of(model, rank, size), weights_of(other, rank, size)):
            np.testing.assert_array_equal(copied, own)
        assert other.count_params() == make_model().count_params()
    plain = make_model()
    plain.set_weights(weights)
    compare(model, plain, rank, size, 0)


def test_options_that_are_not_possible(strategy, size):
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        inputs, labels = data(BATCH)
        if size > 1:
            compiled(model, jit_compile=True)
            with pytest.raises(NotImplementedError, match="compiled with jit_compile=True"):
                model.fit(list(inputs), labels, verbose=0)
