"""Makes keys of dynamic tables by hashing ids, in TensorFlow's own operations."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def crossed(*parts: tf.Tensor) -> tf.Tensor:
    """Hashes int64 tensors together, element by element, to int64; their order matters.

    The mix is SplitMix64's output function (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014).
    """
    result = tf.zeros([], tf.uint64)
    for part in parts:
        x = result + tf.bitcast(part, tf.uint64) + _constant(0x9E3779B97F4A7C15)
        x = _shifted(x, 30) * _constant(0xBF58476D1CE4E5B9)
        x = _shifted(x, 27) * _constant(0x94D049BB133111EB)
        result = _shifted(x, 31)
    return tf.bitcast(result, tf.int64)


def _shifted(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _constant(bits)))


def _constant(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
