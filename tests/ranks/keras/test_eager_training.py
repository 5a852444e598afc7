"""Training without a `tf.function`: a tape in a notebook, and `fit` with run_eagerly=True."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf2

from collective.errors import RankError
from tests.ranks.keras.models import (
    BATCH,
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(c, marks=[pytest.mark.matrix] * (c != "clip_by_global_norm")) for c in CLIPPED],
)
def test_clipping_counts_rows_of_all_ranks(strategy, rank, size, name):
    equals(strategy, rank, size, lambda: new.SGD(0.5), CLIPPED[name], dense=True)


@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
def test_fit_run_eagerly_equals_one_process(strategy, rank, size):
    """Losses and metrics, too; ranks have other numbers of records to evaluate."""
    all_data, plain = data(BATCH * 6), compiled(make_model())
    history = plain.fit(
        dataset(all_data, BATCH), epochs=2, verbose=0, validation_data=dataset(held_out(), 10)
    )
    want = plain.evaluate(dataset(held_out(), 10), verbose=0, return_dict=True)
    with strategy.scope():
        model = compiled(make_model(strategy.embedding_scope), run_eagerly=True)
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
        for use in (
            tf2.convert_to_tensor,
            lambda x: x.values,
            lambda x: x.indices,
            tf2.function(tf2.identity),
        ):
            with pytest.raises(NotImplementedError, match="would be those of a single rank"):
                use(gradient)
        with pytest.raises(NotImplementedError, match="leave the argument out"):
            tape.gradient(loss, weights[0], unconnected_gradients="zero")
        for was, now in zip(before, weights_of(model, rank, size)):
            np.testing.assert_array_equal(now, was)
        assert int(optimizer.iterations.numpy()) == 2
        train(model, optimizer, mine[3:5])
        assert int(optimizer.iterations.numpy()) == 4


class Fails(keras.Model):
    """Fails in its third step on one rank."""

    def __init__(self, inner, fails):
        super().__init__()
        self.inner, self.fails, self.steps = inner, fails, 0

    def train_step(self, data):
        (users, words), labels = data
        with tf2.GradientTape() as tape:
            loss = loss_of(self.inner, users, words, labels)
        self.steps += 1
        if self.fails and self.steps == 3:
            raise KeyError("boom")
        self.optimizer.minimize(loss, self.inner.trainable_variables, tape=tape)
        return {"loss": loss}


def test_an_error_of_one_rank_in_a_step_is_an_error_of_all(strategy, rank, size):
    with strategy.scope():
        inner = make_model(strategy.embedding_scope)
        model = Fails(inner, rank == size - 1)
        model.compile("adam", run_eagerly=True)
        own = dataset(part(data(), rank, size), BATCH // size)
        error, message = (KeyError, "boom") if rank == size - 1 else (RankError, "KeyError: .boom")
        with pytest.raises(error, match=message):
            model.fit(own, verbose=0)
            strategy.barrier() if hasattr(strategy, "barrier") else None
        if rank == size - 1 and size > 1:
            with pytest.raises(RankError):
                inner(batches(part(data(), rank, size), size)[0][:2])
        assert int(model.optimizer.iterations.numpy()) == 2
        inner(batches(part(data(), rank, size), size)[0][:2])
