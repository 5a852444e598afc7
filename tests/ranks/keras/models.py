"""A Keras model with two tables, its data, and plain Keras in one process as the reference."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import numpy as np
import tensorflow as tf2

from collective.tables.table import Sharded, shard_view

keras = tf2.keras
BATCH, STEPS = 24, 20
USERS, WORDS = 50, 30
_random = np.random.default_rng(3)
USER_ROWS = _random.normal(0, 0.5, (USERS, 8)).astype(np.float32)
WORD_ROWS = _random.normal(0, 0.5, (WORDS, 4)).astype(np.float32)


def data(records: int = BATCH * STEPS, seed: int = 0) -> Any:
    """Returns ((users [n], words [n, 3]), labels [n])."""
    random = np.random.default_rng(seed)
    users = random.integers(0, USERS, records)
    words = random.integers(0, WORDS, (records, 3))
    return (users, words), random.integers(0, 2, records).astype(np.float32)


def part(arrays: Any, rank: int, size: int, batch: int = BATCH) -> Any:
    """Returns this rank's share of each global batch."""

    def own(x: np.ndarray) -> np.ndarray:
        batches = x.reshape(-1, batch, *x.shape[1:])
        step = batch // size
        return batches[:, rank * step : (rank + 1) * step].reshape(-1, *x.shape[1:])

    return tf2.nest.map_structure(own, arrays)


def dataset(arrays: Any, batch: int) -> Any:
    return tf2.data.Dataset.from_tensor_slices(arrays).batch(batch)


def make_model(embedding_scope: Callable[[], Any] = contextlib.nullcontext) -> Any:
    """Builds the model; its tables and weights start from the same numbers each time."""
    constant = keras.initializers.Constant
    user = keras.Input([], dtype=tf2.int64)
    words = keras.Input([3], dtype=tf2.int64)
    with embedding_scope():
        user_rows = keras.layers.Embedding(USERS, 8, constant(USER_ROWS))(user)
        word_rows = keras.layers.Embedding(WORDS, 4, constant(WORD_ROWS))(words)
    hidden = tf2.concat([user_rows, tf2.reduce_sum(word_rows, 1)], 1)
    for number, (units, activation) in enumerate([(8, "relu"), (1, None)]):
        start = keras.initializers.GlorotUniform(seed=number)
        hidden = keras.layers.Dense(units, activation, kernel_initializer=start)(hidden)
    return keras.Model([user, words], hidden)


def weights_of(model: Any, rank: int, size: int) -> list[np.ndarray]:
    """Returns this rank's part of a model's trainable weights."""
    values = []
    for variable in model.trainable_variables:
        if isinstance(variable, Sharded):
            with shard_view():
                values.append(variable.read_value().numpy())
        else:
            values.append(variable.numpy())
    return values


def compare(model: Any, plain: Any, rank: int, size: int, atol: float = 1e-6) -> None:
    """Holds that a model on all ranks has the weights of one in one process."""
    for variable, own, want in zip(
        model.trainable_variables, weights_of(model, rank, size), plain.trainable_variables
    ):
        want = want.numpy()
        if isinstance(variable, Sharded):
            want = want[rank::size]
        np.testing.assert_allclose(own, want, rtol=0, atol=atol, err_msg=variable.name)


def loss_of(model: Any, users: Any, words: Any, labels: Any) -> Any:
    return tf2.reduce_mean((model([users, words], training=True)[:, 0] - labels) ** 2)


def train_step(model: Any, optimizer: Any, dense: bool = False) -> Any:
    """Returns a `tf.function` that trains with a batch and returns its loss.

    Args:
        dense: whether gradients become matrices, in which each row of a table is summed up.
    """

    @tf2.function
    def step(users, words, labels):
        with tf2.GradientTape() as tape:
            loss = loss_of(model, users, words, labels)
        gradients = tape.gradient(loss, model.trainable_variables)
        if dense:
            gradients = [tf2.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def batches(arrays: Any, size: int = 1) -> list[Any]:
    """Returns the batches of a rank, as tensors (users, words, labels)."""
    (users, words), labels = arrays
    step = BATCH // size
    return [
        tuple(tf2.constant(x[first : first + step]) for x in (users, words, labels))
        for first in range(0, len(labels), step)
    ]
