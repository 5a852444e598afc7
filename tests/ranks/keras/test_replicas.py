"""Ranks that train a Keras model by other settings, functions or variables find out.

Plain Keras has one process; every number is the same there.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf2

from collective.errors import RankError, ReplicaError
from tests.ranks import grouped
from tests.ranks.keras.models import (
    BATCH,
    batches,
    compare,
    data,
    dataset,
    keras,
    make_model,
    part,
    train_step,
)

LR = 0.01
SETTINGS = {
    "learning_rate": lambda other: keras.optimizers.Adam(LR * (1 + other)),
    "beta_1": lambda other: keras.optimizers.Adam(LR, beta_1=0.9 - 0.1 * other),
    "clipnorm": lambda other: keras.optimizers.SGD(LR, clipnorm=1.0 + other),
    "momentum": lambda other: keras.optimizers.legacy.SGD(LR, momentum=0.5 + 0.1 * other),
    "decay_rate": lambda other: keras.optimizers.Adagrad(
        keras.optimizers.schedules.ExponentialDecay(LR, 10, 0.9 - 0.1 * other)
    ),
    "epsilon": lambda other: keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.Adam(LR, epsilon=1e-7 * (1 + other))
    ),
}


@contextlib.contextmanager
def warnings_of(caplog):
    """Yields what rank 0 warns of, on all ranks, once this is left."""
    said = []
    caplog.clear()
    tf2.get_logger().addHandler(caplog.handler)
    try:
        with caplog.at_level("WARNING", logger="tensorflow"):
            yield said
    finally:
        tf2.get_logger().removeHandler(caplog.handler)
    texts = sorted({r.getMessage() for r in caplog.records})
    said += [t for t in grouped.everyone(texts)[0] if "drift" in t or "not equal on all" in t]


def fit(model, rank, size, **options):
    model.fit(dataset(part(data(), rank, size), BATCH // size), verbose=0, **options)


def refused(size, error, match):
    """Holds that an error is raised on several ranks, and none on one."""
    return pytest.raises(error, match=match) if size > 1 else contextlib.nullcontext()


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_of_an_optimizer(strategy, rank, size, name):
    is_last = rank == size - 1 > 0
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        before = model.layers[-1].kernel.numpy()
        model.compile(SETTINGS[name](float(is_last)), "mse")
        with refused(size, ValueError, rf"start of fit.*{name} is .* on rank 0, and .* on rank"):
            fit(model, rank, size)
        if size > 1:
            np.testing.assert_array_equal(model.layers[-1].kernel.numpy(), before)
        model.compile(SETTINGS[name](0.0), "mse")
        fit(model, rank, size)


def test_another_loss_or_layer(strategy, rank, size):
    is_last = rank == size - 1 > 0
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        model.compile("sgd", "mae" if is_last else "mse")
        with refused(size, ValueError, "loss is mse on rank 0, and mae on rank"):
            fit(model, rank, size)
        smooth = keras.losses.BinaryCrossentropy(True, label_smoothing=0.1 if is_last else 0.2)
        model.compile("sgd", smooth)
        with refused(size, ValueError, "label_smoothing is 0.2 on rank 0, and 0.1 on rank"):
            fit(model, rank, size)
        inputs = keras.Input([3])
        outputs = keras.layers.Dense(1, "relu" if is_last else "elu", name="one")(inputs)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        with refused(size, ValueError, "the layer 'one' is made with other arguments on rank"):
            model.fit(np.ones([8, 3], np.float32), np.ones(8), verbose=0)


def test_settings_that_are_no_numbers_or_words(strategy, rank, size):
    """NaN is equal to itself; bytes, and keys that differ by type only, are left out or told."""

    class Odd(keras.layers.Layer):
        def get_config(self):
            odd = {"nan": float("nan"), "bytes": np.bytes_(b"a"), 1: "one", "1": 2}
            return {**super().get_config(), "odd": odd}

    with strategy.scope():
        inputs = keras.Input([3])
        model = keras.Model(inputs, keras.layers.Dense(1)(Odd()(inputs)))
        model.compile(keras.optimizers.SGD(float("nan")), "mse")
        model.fit(np.ones([8, 3], np.float32), np.ones(8), verbose=0)


def test_a_callback_that_changes_the_rate_by_what_is_of_its_rank(strategy, rank, size):
    class Lowers(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            self.model.optimizer.learning_rate.assign(LR / (1 + rank))

    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        model.compile(keras.optimizers.Adam(LR), "mse")
        what = (
            r"end of epoch 1 .*learning_rate is 0\.0\d* on rank 0, and 0\.00\d* on rank 1.*epochs"
        )
        with refused(size, ValueError, what):
            fit(model, rank, size, epochs=2, callbacks=[Lowers()])


@pytest.mark.parametrize("is_strict", [False, True])
def test_variables_that_are_not_equal_any_more(strategy, rank, size, is_strict, caplog):
    """`scope(check=…)` is an error at its call; without it, rank 0 warns once."""
    with strategy.scope(check=2 if is_strict else False):
        model = make_model(strategy.embedding_scope)
        optimizer = keras.optimizers.Adam(LR)
        step = train_step(model, optimizer)
        calls = batches(part(data(), rank, size), size)
        with warnings_of(caplog) as said:
            step(*calls[0])
            kernel, bias = model.layers[-1].weights
            bias.assign(bias + float(rank))
            what = rf"After call 2 .*'{bias.name}' \(rank 0.*\| rank.*the first call"
            with refused(size if is_strict else 1, ReplicaError, what):
                step(*calls[1])
            for call in [] if is_strict else calls[2:9]:
                step(*call)
        if not is_strict and size > 1:
            (warned,) = said
            assert "After call 2 that trains" in warned and bias.name in warned
        else:
            assert said == []


@pytest.mark.parametrize("kind", ["fit", "eager", "mixed", "loop"])
def test_no_false_alarm(strategy, rank, size, kind, caplog):
    """Neither by comparisons of every call, nor by what functions assign."""
    if kind == "mixed":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        with warnings_of(caplog) as said, strategy.scope(check=1):
            model = make_model(strategy.embedding_scope)
            hidden = keras.layers.BatchNormalization()(model.layers[-1].input)
            hidden = keras.layers.Dropout(0.3)(hidden)
            outputs = keras.layers.Dense(1, dtype="float32")(hidden)
            model = keras.Model(model.inputs, outputs)
            optimizer = keras.optimizers.Adam(LR, use_ema=True, global_clipnorm=1.0)
            if kind in ("fit", "mixed"):
                model.compile(optimizer, "mse", metrics=["mae", keras.metrics.AUC()])
                fit(model, rank, size)
            else:
                step = train_step(model, optimizer)
                if kind == "eager":
                    step = step.python_function
                    optimizer.build(model.trainable_variables)
                for call in batches(part(data(), rank, size), size)[:6]:
                    step(*call)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert said == []


def test_functions_in_another_order(strategy, rank, size):
    """They exchange the same: without their names, each would train by the other's gradients."""

    def made(power, name):
        def step(users, words, labels):
            with tf2.GradientTape() as tape:
                out = model([users, words])[:, 0]
                loss = tf2.reduce_mean(tf2.abs(out - labels) ** power)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            )

        step.__name__ = name
        return tf2.function(step, autograph=False)

    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        optimizer = keras.optimizers.Adagrad(0.1)
        optimizer.build(model.trainable_variables)
        squares, cubes = made(2.0, "squares"), made(3.0, "cubes")
        (first, second, *_) = batches(part(data(), rank, size), size)
        order = (cubes, squares) if rank == size - 1 > 0 else (squares, cubes)
        with refused(size, RankError, "'squares'.*'cubes'.*same functions in the same order"):
            order[0](*first)
        with refused(size, RankError, "'cubes'.*'squares'"):
            order[1](*second)
        if size > 1:
            squares(*first), cubes(*second)
    plain = make_model()
    model, optimizer, mine = plain, keras.optimizers.Adagrad(0.1), model
    optimizer.build(model.trainable_variables)
    first, second, *_ = batches(data())
    made(2.0, "squares")(*first), made(3.0, "cubes")(*second)
    compare(mine, plain, rank, size)


def test_a_dataset_whose_function_has_a_text(strategy, rank, size):
    """Its content tells whether ranks have the same, texts as well as numbers."""
    (users, words), _ = data(BATCH)
    texts = tf2.constant(["a", "b"]), tf2.constant("one")
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        records = dataset(part((users, words), rank, size), BATCH // size)

        def with_text(users, words):
            length = tf2.strings.length(tf2.strings.join([texts[0], texts[1]]))
            return (users + tf2.cast(length[0] - 4, users.dtype), words), users

        got = model.predict(records.map(with_text), verbose=0)
    want = make_model()(part([users, words], rank, size)).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
