"""Makes tensors in whose place a run may put other values."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf


def replaceable(x: tf.Tensor, shape: Any, name: str | None = None) -> tf.Tensor:
    """Returns `x`, passed through a placeholder that a run may feed.

    A tensor of a floating type passes through two. TensorFlow's rewriting to half precision crashes
    where what it rewrites leads to an operation that a run feeds; it doesn't rewrite the first one.

    Args:
        x: any tensor.
        shape: what may be fed instead.
        name: of the placeholder.
    """
    if x.dtype.is_floating:
        x = tf.placeholder_with_default(x, shape)
    return tf.placeholder_with_default(x, shape, name)
