"""Keras trains in graphs: its legacy optimizers over tables, its layers in embedding_scope()."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from collective import Table, checkpoint
from tests.ranks import grouped, reference
from tests.ranks.training import overflowing_in_step_1

pytestmark = pytest.mark.backends("hb")

IDS = np.random.default_rng(0).integers(0, 9, grouped.B)
X = np.random.default_rng(1).normal(size=(grouped.B, 3)).astype(np.float32)
Y = np.random.default_rng(2).integers(0, 2, (grouped.B, 2)).astype(np.float32)
STEP = {"ids": IDS, "x": X, "y": Y}
legacy, mixed_precision = tf2.keras.optimizers.legacy, tf2.keras.mixed_precision


def model(embedding_scope):
    """Returns (loss as a function, [table, dense matrix], placeholders)."""
    with embedding_scope():
        t = reference.table("t", 9, 3)
    w = tf.get_variable("w", initializer=reference.table_values(3, 2, 1))
    feeds = {
        "ids": tf.placeholder(tf.int64, [None]),
        "x": tf.placeholder(tf.float32, [None, 3]),
        "y": tf.placeholder(tf.float32, [None, 2]),
    }

    def loss():
        rows = tf.nn.embedding_lookup(t, feeds["ids"])
        return tf.reduce_mean(tf.square(tf.matmul(rows * feeds["x"], w)) + rows[:, :2])

    return loss, [t, w], feeds


def build(train):
    """Makes a model for `reference.plain`, with the fetch of `train(loss function, variables)`."""

    def made(embedding_scope):
        loss, (t, w), feeds = model(embedding_scope)
        return {
            "train": train(loss, [t, w]),
            "w": w.read_value(),
            **grouped.rows_of({"t": t}),
        }, feeds

    return made


def compare(strategy, rank, size, build, names, rtol=2e-5, atol=1e-6, steps=3):
    want, got = grouped.both(
        strategy, rank, size, build, [(["train"], STEP)] * steps + [(names, {})]
    )
    grouped.same(got[-1], want[-1], rtol, atol)


OPTIMIZERS = {
    "sgd": lambda: legacy.SGD(0.3),
    "momentum": lambda: legacy.SGD(0.1, 0.9, nesterov=True),
    "adagrad": lambda: legacy.Adagrad(0.3),
    "adadelta": lambda: legacy.Adadelta(1.0),
    "adam": lambda: legacy.Adam(0.05),
    "amsgrad": lambda: legacy.Adam(0.05, amsgrad=True),
    "adamax": lambda: legacy.Adamax(0.05),
    "nadam": lambda: legacy.Nadam(0.05),
    "rmsprop": lambda: legacy.RMSprop(0.01, centered=True, momentum=0.5),
    "ftrl": lambda: legacy.Ftrl(0.1, l1_regularization_strength=0.01),
    "schedule": lambda: legacy.SGD(tf2.keras.optimizers.schedules.ExponentialDecay(0.3, 1, 0.5)),
    "version 1": lambda: tf.keras.optimizers.Adam(0.05),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_legacy_optimizers(strategy, rank, size, name):
    """Their slots are the shard's."""
    compare(
        strategy,
        rank,
        size,
        build(lambda loss, variables: OPTIMIZERS[name]().get_updates(loss(), variables)),
        ["t", "w"],
        2e-4,
        2e-6,
    )


WAYS = {
    "minimize": lambda optimizer, loss, variables: optimizer.minimize(loss, variables),
    "apply": lambda optimizer, loss, variables: optimizer.apply_gradients(
        zip(tf.gradients(loss(), variables), variables)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_apply_gradients(strategy, rank, size, way):
    compare(
        strategy,
        rank,
        size,
        build(lambda *given: WAYS[way](legacy.Adam(0.05), *given)),
        ["t", "w"],
        2e-4,
    )


@pytest.mark.parametrize(
    "clip", [{"clipvalue": 0.05}, {"clipnorm": 0.05}, {"global_clipnorm": 0.05}], ids=str
)
def test_clipping_is_of_the_whole_gradient(strategy, rank, size, clip):
    """The reference's gradients are made dense: plain TensorFlow takes repeated ids apart."""

    def train(loss, variables):
        gradients = tf.gradients(loss(), variables)
        if not isinstance(variables[0], Table):
            gradients = [tf.convert_to_tensor(g) for g in gradients]
        return legacy.SGD(0.5, **clip).apply_gradients(zip(gradients, variables))

    compare(strategy, rank, size, build(train), ["t", "w"], steps=1)


def test_checkpoints_hold_the_slots(strategy, rank, size, folder):
    """Saved, and restored into a model that has taken other steps, the next step is the one of
    plain TensorFlow.
    """

    def train(loss, variables):
        return legacy.Adam(0.05).get_updates(loss(), variables)

    names = ["t", "w"]
    want = reference.plain(build(train), [(["train"], STEP)] * 3 + [(names, {})])[-1]
    mine = {name: reference.part(value, rank, size) for name, value in STEP.items()}
    for steps in (2, 5):
        with strategy.scope(), tf.Graph().as_default():
            fetches, feeds = build(train)(strategy.embedding_scope)
            feed, saver = {feeds[name]: value for name, value in mine.items()}, tf.train.Saver()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for _ in range(steps):
                    session.run(fetches["train"], feed)
                if steps == 2:
                    path = saver.save(session, f"{folder}/model")
                    assert (
                        sum(len(rows) for _, rows in checkpoint.read_table(path, "Adam/t/m")) == 9
                    )
                else:
                    saver.restore(session, path)
                    session.run(fetches["train"], feed)
                    grouped.same(session.run({name: fetches[name] for name in names}), want, 2e-4)


def test_what_legacy_optimizers_do_not_do_is_refused(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        dynamic = tf.get_variable("dynamic", [None, 3])
        loss = tf.reduce_mean(tf.nn.embedding_lookup(dynamic, tf.constant([1, 2], tf.int64)))
        with pytest.raises(NotImplementedError, match="compat.v1.train.*Adam.*'dynamic'"):
            legacy.Adam(0.1).get_updates(loss, [dynamic])
    with strategy.scope(local_steps=2), tf.Graph().as_default():
        loss, variables, _ = model(strategy.embedding_scope)
        with pytest.raises(NotImplementedError, match="compat.v1.train.*local_steps=2"):
            legacy.Adam(0.1).get_updates(loss(), variables)


def scaling(**options):
    """Returns the operation of a step of Keras's optimizer that scales the loss."""

    def train(loss, variables):
        optimizer = mixed_precision.LossScaleOptimizer(legacy.Adagrad(0.3), **options)
        scaled = tf.gradients(optimizer.get_scaled_loss(loss()), variables)
        gradients = optimizer.get_unscaled_gradients(scaled)
        return optimizer.apply_gradients(zip(gradients, variables))

    return train


def test_a_loss_scale_of_keras(strategy, rank, size):
    train = scaling(dynamic=False, initial_scale=64)
    compare(strategy, rank, size, build(train), ["t", "w"], 2e-4)


def test_a_dynamic_loss_scale_of_keras(strategy, rank, size):
    """In its second step one row's gradient overflows, which only the row's owner sees."""

    def train(loss, variables):
        nothing, step = overflowing_in_step_1(variables[0])
        trained = scaling(initial_scale=128.0)(lambda: loss() + nothing, variables)
        with tf.control_dependencies([trained]):
            return tf.assign_add(step, 1).op

    compare(strategy, rank, size, build(train), ["t", "w"], 2e-4)


@pytest.mark.parametrize("way", ["minimize", "apply"])
def test_new_optimizers_would_train_nothing(strategy, way):
    """In plain TensorFlow their operation counts iterations, and updates no variable."""
    with strategy.scope(), tf.Graph().as_default():
        loss, variables, _ = model(strategy.embedding_scope)
        with pytest.raises(NotImplementedError, match="legacy.Adam"):
            WAYS[way](tf2.keras.optimizers.Adam(0.1), loss, variables)


def test_slots_are_whole_to_whoever_reads_them(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 11, 3)
        ids = tf.placeholder(tf.int64, [None])
        optimizer = tf.keras.optimizers.legacy.Adam(0.1)
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids)))
        train = tf.group(optimizer.get_updates(loss, [t]))
        slot = optimizer.get_slot(t, "m")
        assert slot.shape.as_list() == [11, 3]
        return {"train": train, "slot": slot, "row": tf.nn.embedding_lookup(slot, [10, 0])}, {
            "ids": ids
        }

    batch = {"ids": np.random.default_rng(4).integers(0, 11, grouped.B)}
    want, got = grouped.both(
        strategy, rank, size, build, [(["train"], batch), (["slot", "row"], {})]
    )
    grouped.same(got[-1], want[-1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["fit", "train_on_batch", "dataset"])
def test_models_of_keras(strategy, rank, size, way):
    """`fit`, `evaluate`, `predict` of a compiled model, each rank with its part of every batch."""
    rng, steps = np.random.default_rng(3), 3
    ids = rng.integers(0, 9, (steps, grouped.B, 2))
    y = rng.normal(size=(steps, grouped.B, 1)).astype(np.float32)

    def run(scope, embedding_scope, r, n):
        mine = [
            np.concatenate([reference.part(batch, r, n) for batch in whole]) for whole in (ids, y)
        ]
        batch = grouped.B // n
        with scope, tf.Graph().as_default(), tf.Session().as_default() as session:
            tf.keras.backend.set_session(session)
            with embedding_scope():
                table = tf2.keras.layers.Embedding(
                    9, 3, tf.constant_initializer(reference.table_values(9, 3)), input_length=2
                )
            model = tf.keras.Sequential(
                [
                    table,
                    tf2.keras.layers.Flatten(),
                    tf2.keras.layers.BatchNormalization(trainable=False),
                    tf2.keras.layers.Dense(1, kernel_initializer=tf.constant_initializer(0.3)),
                ]
            )
            model.compile(legacy.Adam(0.05), "mse", metrics=["mae"])
            for _ in range(2):
                if way == "fit":
                    model.fit(*mine, batch_size=batch, shuffle=False, verbose=0)
                elif way == "dataset":
                    model.fit(
                        tf2.data.Dataset.from_tensor_slices(tuple(mine)).batch(batch),
                        steps_per_epoch=steps,
                        verbose=0,
                    )
                else:
                    for step in range(steps):
                        model.train_on_batch(*(x[step * batch : (step + 1) * batch] for x in mine))
            loss, error = model.evaluate(*mine, batch_size=batch, verbose=0)
            out = {
                "predicted": model.predict(mine[0], batch_size=batch),
                "loss": loss,
                "error": error,
                "weights": dict(zip(("t", "a", "b", "c", "d", "e", "f"), model.get_weights())),
            }
            tf.keras.backend.set_session(None)
            return out

    want = run(contextlib.nullcontext(), contextlib.nullcontext, 0, 1)
    got = run(strategy.scope(plan="quiet"), strategy.embedding_scope, rank, size)
    grouped.same(got["weights"], want["weights"], 2e-4, 2e-6)
    everyones = grouped.everyone({name: got[name] for name in ("predicted", "loss", "error")})
    grouped.same(np.mean([mine["loss"] for mine in everyones]), want["loss"], 2e-4)
    for mine in everyones:
        grouped.same(mine["error"], want["error"], 2e-4)
    predicted = np.concatenate(
        [
            np.concatenate([mine["predicted"].reshape(steps, -1)[step] for mine in everyones])
            for step in range(steps)
        ]
    )
    grouped.same(predicted, want["predicted"][:, 0], 2e-4, 1e-5)
