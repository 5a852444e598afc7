"""Builds dense layers whose initial values depend on the seed and their names alone.

TensorFlow draws initial values by the number of operations that a graph had before. Here a session
and an Estimator, and any number of ranks, start alike.
"""

from __future__ import annotations

import zlib

import tensorflow.compat.v1 as tf


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def weights(name: str, shape: list[int]) -> tf.Tensor:
    """Makes weights by Glorot's rule, or finds them where they were made before."""
    return tf.get_variable(
        name, shape, initializer=tf.glorot_uniform_initializer(seed=seed_of(name))
    )


def biases(name: str, shape: list[int]) -> tf.Tensor:
    return tf.get_variable(name, shape, initializer=tf.zeros_initializer())


def dense(name: str, values: tf.Tensor, units: int, activation=None) -> tf.Tensor:
    """Builds a layer from [..., I] to [..., units]."""
    inputs = int(values.shape[-1])
    kernel = weights(f"{name}/kernel", [inputs, units])
    result = tf.tensordot(values, kernel, 1) if values.shape.rank > 2 else tf.matmul(values, kernel)
    result = result + biases(f"{name}/bias", [units])
    return activation(result) if activation else result


def network(name: str, values: tf.Tensor, units: tuple[int, ...], last=tf.nn.elu) -> tf.Tensor:
    """Builds layers of `units`, the last with the activation `last` or with none.

    ELU is smooth where it bends: at relu's bend the order of a sum, which the number of ranks
    changes, could decide a gradient.
    """
    for number, size in enumerate(units):
        activation = last if number == len(units) - 1 else tf.nn.elu
        values = dense(f"{name}_{number}", values, size, activation)
    return values
