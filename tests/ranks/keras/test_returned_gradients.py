"""Gradients that a `tf.function` returns, clipped and applied by eager code or another function."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

from collective import TablePolicy, get_embedding_variable
from collective.errors import RankError, TableError
from tests.ranks.keras.models import (
    WORDS,
    batches,
    compare,
    data,
    keras,
    loss_of,
    make_model,
    part,
    weights_of,
)

pytestmark = pytest.mark.double

new, legacy = keras.optimizers, keras.optimizers.legacy
OPTIMIZERS = {
    "SGD": lambda: new.SGD(0.5),
    "Adagrad": lambda: new.Adagrad(0.05),
    "Adam": lambda: new.Adam(0.003),
    "legacy SGD": lambda: legacy.SGD(0.5, momentum=0.9),
    "legacy Adagrad": lambda: legacy.Adagrad(0.05),
    "legacy Adam": lambda: legacy.Adam(0.003),
}


def taking(model, dense=False, change=lambda gradients: gradients, apart=False):
    """Returns a function that takes gradients.

    Args:
        dense: whether they become matrices first, in which each row of a table is summed up.
        change: of gradients, in the function.
        apart: whether a persistent tape takes each by itself.
    """
    weights = model.trainable_variables

    @tf2.function
    def gradients(users, words, labels):
        with tf2.GradientTape(persistent=True) as tape:
            loss = loss_of(model, users, words, labels)
        if apart:
            taken = [tape.gradient(loss, weight) for weight in weights]
        else:
            taken = tape.gradient(loss, weights)
        if dense:
            taken = [tf2.convert_to_tensor(gradient) for gradient in taken]
        return change(taken)

    return gradients


def changing(change, apart=False):
    """Returns a way to train: eager code changes and applies what a function returns."""

    def train(model, optimizer, own, dense):
        gradients = taking(model, dense, apart=apart)
        for batch in own:
            changed = change(gradients(*batch))
            optimizer.apply_gradients(zip(changed, model.trainable_variables))

    return train


def by_functions(clip):
    """Returns a way to train: functions take, `clip` and apply."""

    def train(model, optimizer, own, dense):
        gradients, weights = taking(model, dense), model.trainable_variables
        change = tf2.function(clip)

        @tf2.function
        def apply(named):
            optimizer.apply_gradients((named[weight.name], weight) for weight in weights)

        for batch in own:
            clipped = change(gradients(*batch))
            apply({weight.name: gradient for weight, gradient in zip(weights, clipped)})

    return train


class Trainer:
    """Takes gradients in a method, with the loss, by names."""

    def __init__(self, model):
        self.model = model

    @tf2.function
    def gradients(self, batch):
        with tf2.GradientTape() as tape:
            loss = loss_of(self.model, *batch)
        named = {weight.name: weight for weight in self.model.trainable_variables}
        return {"loss": loss, "gradients": tape.gradient(loss, named)}


def by_a_method(model, optimizer, own, dense):
    trainer = Trainer(model)
    for batch in own:
        named = trainer.gradients(batch)["gradients"]
        optimizer.apply_gradients((named[w.name], w) for w in model.trainable_variables)


def by_an_outer_function(model, optimizer, own, dense):
    """What one function returns, the function around it applies."""
    gradients = taking(model, dense)

    @tf2.function
    def step(batch):
        optimizer.apply_gradients(zip(gradients(*batch), model.trainable_variables))

    for batch in own:
        step(batch)


def of_tensors(model, optimizer, own, dense):
    """A function returns values and ids, of which eager code makes gradients."""

    def parts(taken):
        return [
            {"values": g.values, "ids": g.indices} if isinstance(g, tf2.IndexedSlices) else g
            for g in taken
        ]

    gradients = taking(model, change=parts)
    for batch in own:
        made = [
            tf2.IndexedSlices(g["values"], g["ids"], w.shape) if isinstance(g, dict) else g
            for g, w in zip(gradients(*batch), model.trainable_variables)
        ]
        optimizer.apply_gradients(zip(made, model.trainable_variables))


def halved(taken):
    return [tf2.math.scalar_mul(0.5, gradient) for gradient in taken]


def changed_inside(model, optimizer, own, dense):
    """A function returns gradients that it has clipped and scaled."""
    gradients = taking(model, dense, lambda gs: halved(tf2.clip_by_global_norm(gs, 0.05)[0]))
    for batch in own:
        optimizer.apply_gradients(zip(gradients(*batch), model.trainable_variables))


def added_up(model, optimizer, own, dense):
    """Eager code adds up what two calls return."""
    gradients = taking(model, dense)
    for one, two in zip(own[::2], own[1::2]):
        summed = [tf2.add_n(pair) / 2 for pair in zip(gradients(*one), gradients(*two))]
        optimizer.apply_gradients(zip(summed, model.trainable_variables))


def by_a_known_norm(taken):
    return tf2.clip_by_global_norm(taken, 0.05, tf2.linalg.global_norm(taken))[0]


# How it trains, and whether plain Keras's gradients become matrices: norms count each row once.
WAYS = {
    "eager optimizer": (changing(lambda taken: taken), False),
    "another function": (by_functions(lambda taken: taken), False),
    "a persistent tape": (changing(lambda taken: taken, apart=True), False),
    "a method": (by_a_method, False),
    "an outer function": (by_an_outer_function, False),
    "tensors": (of_tensors, False),
    "scaled": (changing(halved), False),
    "added up": (added_up, False),
    "clipped by a function": (
        by_functions(lambda taken: tf2.clip_by_global_norm(taken, 0.05)[0]),
        True,
    ),
    "changed inside": (changed_inside, True),
    "clip_by_global_norm": (changing(lambda taken: tf2.clip_by_global_norm(taken, 0.05)[0]), True),
    "global_norm": (changing(by_a_known_norm), True),
    "clip_by_norm": (changing(lambda taken: [tf2.clip_by_norm(g, 0.02) for g in taken]), True),
    "clip_by_value": (
        changing(lambda taken: [tf2.clip_by_value(g, -0.01, 0.01) for g in taken]),
        True,
    ),
}


def equals(strategy, rank, size, optimizer, way):
    train, dense = WAYS[way]
    arrays, plain = data(), make_model()
    train(plain, optimizer(), batches(arrays)[:10], dense)
    with strategy.scope():
        model, on_ranks = make_model(strategy.embedding_scope), optimizer()
        train(model, on_ranks, batches(part(arrays, rank, size), size)[:10], False)
    assert int(on_ranks.iterations.numpy()) == (5 if way == "added up" else 10)
    compare(model, plain, rank, size)


@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.matrix] * (i > 1)) for i, w in enumerate(WAYS)]
)
def test_every_way_equals_one_process(strategy, rank, size, way, caplog):
    """Nothing is said of replicated variables that such gradients update."""
    with caplog.at_level("WARNING", logger="tensorflow"):
        equals(strategy, rank, size, OPTIMIZERS["SGD"], way)
    assert "drift apart" not in caplog.text


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["eager optimizer", "another function", "tensors"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SGD"])
def test_every_optimizer_equals_one_process(strategy, rank, size, name, way):
    equals(strategy, rank, size, OPTIMIZERS[name], way)


@pytest.mark.matrix
def test_eager_code_sees_the_rows_of_all_ranks(strategy, rank, size):
    """Of a gradient that a function returns, or a tape, and of what a function makes of one."""

    def computed(taken):
        gradient = taken[0]
        doubled = tf2.IndexedSlices(
            gradient.values * 2, tf2.identity(gradient.indices), gradient.dense_shape
        )
        largest = tf2.reduce_max(tf2.abs(gradient.values))
        return gradient, doubled, largest, tf2.shape(gradient.values)[0], gradient.values

    def seen(model, batch):
        table, weights = model.trainable_variables[0], taking(model, change=computed)
        gradient, doubled, largest, _, _ = weights(*batch)
        with tf2.GradientTape() as tape:
            loss = loss_of(model, *batch)
        matrices = [gradient, doubled, tape.gradient(loss, table), -gradient]
        return [*(tf2.convert_to_tensor(x).numpy() for x in matrices)], largest.numpy()

    plain = make_model()
    want, _ = seen(plain, batches(data())[0])
    with strategy.scope():
        model, mine = make_model(strategy.embedding_scope), batches(part(data(), rank, size), size)
        got, largest = seen(model, mine[0])
        gradient, _, _, count, values = taking(model, change=computed)(*mine[0])
    for one, other in zip(got, want):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    np.testing.assert_allclose(largest, np.abs(want[0]).max(), rtol=1e-5)
    assert count == len(values) == np.any(want[0], 1).sum()
    assert str(gradient) == f"the gradient of table '{model.trainable_variables[0].op.name}'"


@pytest.mark.matrix
def test_what_eager_code_could_not_apply_is_refused(strategy, rank, size):
    """On all ranks, before anything has changed; training goes on after it."""
    mine = batches(part(data(), rank, size), size)
    with strategy.scope():
        model, optimizer = make_model(strategy.embedding_scope), new.SGD(0.5)
        weights, gradients = model.trainable_variables, taking(model)
        before, taken = weights_of(model, rank, size), gradients(*mine[0])
        apply = tf2.function(lambda: optimizer.apply_gradients(zip(taken, weights)))
        with pytest.raises(NotImplementedError, match="Give the function the gradient as an arg"):
            apply()
        if size > 1:
            places = taking(model, change=lambda gs: tf2.unique(gs[0].indices).idx)
            with pytest.raises(TableError, match="it has places among these"):
                places(*mine[0])
            for change in (
                lambda gs: tf2.math.cumsum(gs[0].values),
                lambda gs: tf2.while_loop(
                    lambda i, x: i < 2,
                    lambda i, x: (i + 1, x + tf2.convert_to_tensor(gs[0])),
                    (tf2.constant(0), tf2.zeros([WORDS, 4])),
                )[1],
            ):
                with pytest.raises(TableError, match="computes with the gradient of table 'emb"):
                    taking(model, change=change)(*mine[0])
            with pytest.raises(RankError, match="calls the function '.*rows"):
                taken[0].values if rank == 0 else model(mine[0][:2])
            with strategy.scope(embedding_gradients="sum"):
                summed = taking(model)
                ratio = tf2.linalg.global_norm(summed(*mine[0])[:1]) / tf2.linalg.global_norm(
                    taken[:1]
                )
                np.testing.assert_allclose(ratio, size, rtol=1e-5)
                for refused in (
                    lambda: summed(*mine[0])[0].values,
                    lambda: taking(model, change=lambda gs: gs[0].values)(*mine[0]),
                ):
                    with pytest.raises(NotImplementedError, match="Let the tf.function return the"):
                        refused()
        for was, now in zip(before, weights_of(model, rank, size)):
            np.testing.assert_array_equal(now, was)
        optimizer.apply_gradients(zip(taken, weights))
        assert int(optimizer.iterations.numpy()) == 1


@pytest.mark.matrix
def test_keys_that_are_drawn_need_the_update(strategy, rank, size):
    """Which keys are admitted depends on the step, which the function doesn't lead to."""
    with strategy.scope():
        policy = TablePolicy(admit_probability=0.5)
        table = get_embedding_variable("t", 2, ev_option=policy)

        @tf2.function
        def gradients(keys):
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_sum(tf2.nn.embedding_lookup(table, keys))
            return tape.gradient(loss, table)

        with pytest.raises(NotImplementedError, match="'t', and admit_probability=0.5 .*, too, or"):
            gradients(tf2.constant([1, 2], tf2.int64))
