"""Training without a `tf.function`: a tape in a notebook, and `fit` with run_eagerly=True."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
import tensorflow as tf2

from collective.coordination.barrier import exchange
from collective.errors import RankError
from tests.ranks.keras.models import (
    BATCH,
    USER_ROWS,
    USERS,
    batches,
    compare,
    data,
    dataset,
    keras,
    loss_of,
    make_model,
    part,
    weights_of,
)
from tests.ranks.keras.test_fit import Lookups, compiled, held_out, same_logs

pytestmark = pytest.mark.double

new, legacy = keras.optimizers, keras.optimizers.legacy
OPTIMIZERS = {
    "Adam": lambda: new.Adam(0.003),
    "legacy Adagrad": lambda: legacy.Adagrad(0.05),
    "SGD, global_clipnorm": lambda: new.SGD(0.5, momentum=0.9, global_clipnorm=0.05),
    "AdamW, use_ema": lambda: new.AdamW(0.003, use_ema=True, ema_overwrite_frequency=7),
    "legacy Adam": lambda: legacy.Adam(0.003, amsgrad=True),
}
CLIPPED = {
    "clip_by_global_norm": lambda gs: tf2.clip_by_global_norm(gs, 0.05)[0],
    "clip_by_norm": lambda gs: [tf2.clip_by_norm(g, 0.02) for g in gs],
    "clip_by_value": lambda gs: [tf2.clip_by_value(g, -0.01, 0.01) for g in gs],
    "global_norm": lambda gs: tf2.clip_by_global_norm(gs, 0.05, tf2.linalg.global_norm(gs))[0],
}


def train(model, optimizer, own, change=lambda gradients: gradients, dense=False):
    """Trains without a function.

    Args:
        change: of gradients.
        dense: whether gradients become matrices first, in which each row of a table is summed up.
    """
    for users, words, labels in own:
        with tf2.GradientTape() as tape:
            loss = loss_of(model, users, words, labels)
        gradients = tape.gradient(loss, model.trainable_variables)
        if dense:
            gradients = [tf2.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(change(gradients), model.trainable_variables))


def equals(strategy, rank, size, optimizer, change=lambda gradients: gradients, dense=False):
    arrays, plain = data(), make_model()
    train(plain, optimizer(), batches(arrays)[:12], change, dense)
    with strategy.scope():
        model, on_ranks = make_model(strategy.embedding_scope), optimizer()
        train(model, on_ranks, batches(part(arrays, rank, size), size)[:12], change)
    assert int(on_ranks.iterations.numpy()) == 12
    compare(model, plain, rank, size)


@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    "name", [pytest.param(o, marks=[pytest.mark.matrix] * (o != "Adam")) for o in OPTIMIZERS]
)
def test_a_tape_equals_one_process(strategy, rank, size, name):
    equals(strategy, rank, size, OPTIMIZERS[name], dense="norm" in name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_counts_rows_of_all_ranks(strategy, rank, size, name):
    equals(strategy, rank, size, lambda: new.SGD(0.5), CLIPPED[name], dense=True)


@pytest.mark.slow
@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
def test_fit_run_eagerly_equals_one_process(strategy, rank, size):
    """Losses and metrics, too; ranks have other numbers of records to evaluate.

    Tables end as averages, which start from their rows.
    """

    def optimizer():
        return new.Adam(0.01, use_ema=True, ema_momentum=0.5)

    all_data, plain = data(BATCH * 6), compiled(make_model(), optimizer())
    history = plain.fit(
        dataset(all_data, BATCH), epochs=2, verbose=0, validation_data=dataset(held_out(), 10)
    )
    want = plain.evaluate(dataset(held_out(), 10), verbose=0, return_dict=True)
    with strategy.scope():
        model = compiled(make_model(strategy.embedding_scope), optimizer(), run_eagerly=True)
        mine, own = held_out(rank, size), dataset(part(all_data, rank, size), BATCH // size)
        # Rank 0 has a batch more, which nobody trains with.
        own = own.concatenate(own.take(1)) if rank == 0 and size > 1 else own
        got = model.fit(own, epochs=2, verbose=0, validation_data=dataset(mine, 10))
        compare(model, plain, rank, size)
        same_logs(got.history, history.history)
        last = dataset(mine, 10).take(3 if rank == 0 or size == 1 else 0)
        model.evaluate(last, verbose=0)  # by a single rank
        same_logs(model.evaluate(dataset(mine, 10), verbose=0, return_dict=True), want)
        predicted = model.predict(dataset(mine, 10), verbose=0)
    alone = plain.predict(list(mine[0]), verbose=0)
    np.testing.assert_allclose(predicted, alone, rtol=0, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.either_backend
def test_every_kind_of_lookup_a_regularizer_and_averages(strategy, rank, size):
    all_data = data(BATCH * 5)
    plain = Lookups(contextlib.nullcontext)
    plain.compile("adagrad", "mse")
    want = plain.fit(dataset(all_data, BATCH), verbose=0)
    with strategy.scope():
        model = Lookups(strategy.embedding_scope)
        model.compile("adagrad", "mse", run_eagerly=True)
        got = model.fit(dataset(part(all_data, rank, size), BATCH // size), verbose=0)
    compare(model, plain, rank, size)
    same_logs(got.history, want.history)
    np.testing.assert_allclose(
        model.norm.moving_mean.numpy(), plain.norm.moving_mean.numpy(), rtol=0, atol=1e-6
    )


class Lazy(keras.Model):
    """Makes its table and weights in its first step."""

    def __init__(self, embedding_scope):
        super().__init__()
        self.embedding_scope = embedding_scope

    def build(self, shape):
        with self.embedding_scope():
            self.users = keras.layers.Embedding(USERS, 8, keras.initializers.Constant(USER_ROWS))
            self.users.build([None])
        start = keras.initializers.GlorotUniform(seed=3)
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(1, kernel_initializer=start)

    def call(self, inputs, training=None):
        rows = self.users(inputs[0])
        # Its values are not used: each rank normalises by its own batch.
        self.norm(tf2.stop_gradient(rows), training=training)
        return self.dense(rows)


@pytest.mark.matrix
@pytest.mark.parametrize("all_functions", [False, True])
def test_a_model_that_its_first_step_builds(strategy, rank, size, all_functions):
    """By a tape, by fit, and where TensorFlow calls every function of the script eagerly.

    The data come from a function that makes variables of its own, in other threads.
    """
    arrays = data(BATCH * 5)
    averaged = {"use_ema": True, "ema_overwrite_frequency": 2}

    def fit(embedding_scope, arrays, batch, **options):
        model = Lazy(embedding_scope)
        model.compile(new.AdamW(0.01, **averaged), "mse", **options)
        own = dataset(arrays, batch).map(
            lambda x, y: (
                x,
                tf2.ensure_shape(
                    tf2.py_function(lambda z: z * tf2.Variable(1.0), [y], tf2.float32), y.shape
                ),
            )
        )
        model.fit(own, epochs=2, verbose=0)
        return model

    def by_tape(embedding_scope, own):
        model, optimizer = Lazy(embedding_scope), new.AdamW(0.01, **averaged)
        for users, words, labels in own:
            with tf2.GradientTape() as tape:
                loss = loss_of(model, users, words, labels)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return model

    plain = fit(contextlib.nullcontext, arrays, BATCH)
    plain_by_tape = by_tape(contextlib.nullcontext, batches(arrays))
    mine = part(arrays, rank, size)
    with strategy.scope():
        tf2.config.run_functions_eagerly(all_functions)
        try:
            if all_functions:
                model = fit(strategy.embedding_scope, mine, BATCH // size)
            else:
                model = fit(strategy.embedding_scope, mine, BATCH // size, run_eagerly=True)
            taped = by_tape(strategy.embedding_scope, batches(mine, size))
        finally:
            tf2.config.run_functions_eagerly(False)
    compare(model, plain, rank, size)
    compare(taped, plain_by_tape, rank, size)
    for own, want in ((model, plain), (taped, plain_by_tape)):
        np.testing.assert_allclose(
            own.norm.moving_mean.numpy(), want.norm.moving_mean.numpy(), rtol=0, atol=1e-6
        )


@pytest.mark.matrix
def test_whatever_a_script_does_with_tapes(strategy, rank, size):
    """Two tapes at once, one table alone, which is looked up twice, and hyperparameters."""

    def train_by_two(model, own):
        step, weights = [0.0], model.trainable_variables
        table = next(weight for weight in weights if weight.shape == (USERS, 8))
        dense = {weight.name: weight for weight in weights if "dense" in weight.name}
        first, second = new.SGD(0.1, momentum=0.5), legacy.SGD(lambda: 0.01 * step[0])
        for users, words, labels in own:
            step[0] += 1
            first.momentum = 0.5 + 0.05 * step[0]
            with tf2.GradientTape() as one, tf2.GradientTape(watch_accessed_variables=False) as two:
                two.watch(table)
                loss = loss_of(model, users, words, labels)
                rows = tf2.gather(table, words) * tf2.nn.embedding_lookup(table, users)[:, None]
                other = tf2.reduce_mean(rows) + tf2.reduce_mean(tf2.gather(table, users) ** 2)
            by_name = one.gradient(loss, dense)
            first.apply_gradients((by_name[name], dense[name]) for name in dense)
            second.apply_gradients([(two.gradient(other, table), table)])
        return model

    arrays = data()
    plain = train_by_two(make_model(), batches(arrays)[:5])
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        train_by_two(model, batches(part(arrays, rank, size), size)[:5])
        compare(model, plain, rank, size)
        table = next(weight for weight in model.weights if weight.shape == (USERS, 8))
        norms = []
        for reduction in ("mean", "sum"):
            with strategy.scope(embedding_gradients=reduction), tf2.GradientTape() as tape:
                loss = tf2.reduce_sum(tf2.gather(table, [0, 1, 2, 3]))
                norms.append(tf2.linalg.global_norm([tape.gradient(loss, table)]).numpy())
        np.testing.assert_allclose(norms, [32**0.5, size * 32**0.5], rtol=1e-6)


@pytest.mark.matrix
def test_what_one_rank_refuses_all_refuse(strategy, rank, size):
    """Before anything has changed; training goes on after it."""
    mine = batches(part(data(), rank, size), size)
    with strategy.scope():
        model, optimizer = make_model(strategy.embedding_scope), new.Adam(0.01)
        train(model, optimizer, mine[:2])
        before = weights_of(model, rank, size)
        users, words, labels = mine[2]
        with pytest.raises(tf2.errors.InvalidArgumentError, match=r"id \d+ is not in \[0, 50\)"):
            train(model, optimizer, [(users + 77 * (rank == size - 1), words, labels)])
        weights = model.trainable_variables
        with tf2.GradientTape(persistent=True) as tape:
            loss = loss_of(model, *mine[2])
            if size > 1:
                with pytest.raises(NotImplementedError, match="taken while a tf.GradientTape rec"):
                    tape.gradient(loss, weights)
        if size > 1:
            with pytest.raises(RankError, match="gradients_of_dense.*and_5_others"):
                tape.gradient(loss, weights if rank == 0 else weights[:1])
            gradients = tape.gradient(loss, weights)
            with pytest.raises(RankError, match="update_by_Adam"):
                model(mine[2][:2]) if rank == 0 else optimizer.apply_gradients(
                    zip(gradients, weights)
                )
        gradient = tape.gradient(loss, weights[0])
        with pytest.raises(NotImplementedError, match="leave the argument out"):
            tape.gradient(loss, weights[0], unconnected_gradients="zero")
        half = {"mixed_precision": "float16"}, {"mixed_precision": "bfloat16"}
        for option in ({"local_steps": 2}, *half):
            with strategy.scope(**option):
                for refused in (
                    lambda: tape.gradient(loss, weights),
                    lambda: optimizer.apply_gradients([(gradient, weights[0])]),
                ):
                    with pytest.raises(NotImplementedError, match="is for graphs, but gradients"):
                        refused()
        for was, now in zip(before, weights_of(model, rank, size)):
            np.testing.assert_array_equal(now, was)
        assert int(optimizer.iterations.numpy()) == 2
        train(model, optimizer, mine[3:5])
        assert int(optimizer.iterations.numpy()) == 4


@pytest.mark.matrix
def test_a_dropped_variable_that_one_rank_still_holds(strategy, rank):
    """Python collects what refers to itself on each rank at a moment of its own."""
    with strategy.scope():
        dropped = [tf2.Variable(1.0, name="dropped")]
        dropped.append(dropped)
        del dropped
        if rank == 0:
            gc.collect()
        variable = tf2.Variable(float(rank))
        with tf2.GradientTape() as tape:
            square = variable * variable
        assert float(tape.gradient(square, variable)) == 0.0 == float(variable)


@pytest.mark.matrix
def test_what_ranks_do_differently_is_an_error_of_all(strategy, rank, size):
    """A number of lookups, a variable, a batch that only one rank has."""
    if size == 1:
        return
    mine, is_last = batches(part(data(), rank, size), size), rank == size - 1
    with strategy.scope():
        model, optimizer = make_model(strategy.embedding_scope), new.Adam(0.01)
        train(model, optimizer, mine[:1])
        before, table = weights_of(model, rank, size), model.trainable_variables[0]
        with tf2.GradientTape() as tape:
            once, again = tf2.gather(table, [1, 2]), tf2.gather(table, [2, 3])
            loss = tf2.reduce_sum(once + again if is_last else once)
        with pytest.raises(RankError, match="used by rank .* only"):
            tape.gradient(loss, table)
        of_one_rank = [tf2.Variable(1.0, name="of_one_rank")] if is_last else []
        with pytest.raises(RankError, match="initialize of_one_rank:0"):
            train(model, optimizer, mine[1:2])
        of_one_rank.clear()
        with pytest.raises(RankError, match="Rank 0: a meeting"):
            train(model, optimizer, mine[1:2]) if is_last else exchange(None, "a meeting", {})
        with tf2.GradientTape(persistent=True) as tape:
            loss = tf2.reduce_sum(tf2.nn.embedding_lookup(table, [1, 2], max_norm=0.1))
        gradient = tape.gradient(loss, table)
        for was, now in zip(before, weights_of(model, rank, size)):
            np.testing.assert_array_equal(now, was)
        optimizer.apply_gradients([(gradient, table)])
        with pytest.raises(NotImplementedError, match="with max_norm=0.1 is taken after an optim"):
            tape.gradient(loss, table)
        assert int(optimizer.iterations.numpy()) == 2


class Fails(keras.Model):
    """Fails in its third step on one rank, by Python or by an operation."""

    def __init__(self, inner, fails, error):
        super().__init__()
        self.inner, self.fails, self.error, self.steps = inner, fails, error, 0

    def train_step(self, data):
        (users, words), labels = data
        with tf2.GradientTape() as tape:
            loss = loss_of(self.inner, users, words, labels)
        self.steps += 1
        if self.fails and self.steps == 3:
            raise self.error(None, None, "boom")
        self.optimizer.minimize(loss, self.inner.trainable_variables, tape=tape)
        return {"loss": loss}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [KeyError, tf2.errors.InvalidArgumentError])
def test_an_error_of_one_rank_in_a_step_is_an_error_of_all(strategy, rank, size, kind):
    with strategy.scope():
        inner = make_model(strategy.embedding_scope)
        model = Fails(inner, rank == size - 1, kind)
        model.compile("adam", run_eagerly=True)
        own = dataset(part(data(), rank, size), BATCH // size)
        error = kind if rank == size - 1 else RankError
        with pytest.raises(error, match="boom" if error is kind else f"{kind.__name__}: .*boom"):
            model.fit(own, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 2
        inner(batches(part(data(), rank, size), size)[0][:2])
