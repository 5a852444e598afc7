"""Mixes the bits of keys, which places those of dynamic tables on ranks; hashes strings to keys.

The mix is SplitMix64's output function (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014), a bijection of 64 bits. It spreads keys evenly over the ranks even if
they were hashed badly or follow a pattern. TensorFlow's operations, which a served model needs, and
NumPy compute the same.
"""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix(keys: tf.Tensor) -> tf.Tensor:
    """Returns uint64 of the int64 `keys`, in their shape."""
    x = tf.bitcast(keys, tf.uint64)
    for shift, factor in _STEPS:
        x = tf.bitwise.bitwise_xor(
            x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint64))
        ) * tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(31, tf.uint64)))


def mix_np(keys: np.ndarray) -> np.ndarray:
    """Returns `mix` of an int64 array."""
    x = np.ascontiguousarray(keys, np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        for shift, factor in _STEPS:
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return np.asarray(x ^ (x >> np.uint64(31)))


def of_strings(strings: tf.Tensor) -> tf.Tensor:
    """Returns int64 keys of strings: FarmHash's 64-bit fingerprint modulo 2**63 - 1.

    It is `tf.strings.to_hash_bucket_fast`, the same on every machine and in every release of
    TensorFlow. Two strings with the same key share a row; among 10**8 strings that is to be
    expected in one of 2,000 tables.
    """
    return tf.strings.to_hash_bucket_fast(strings, 2**63 - 1)
