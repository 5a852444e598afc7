"""The gradient of a shard: `IndexedSlices` that name each row once, scaled to the mean over ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from collective.ops.graph_state import state_of

_taken = threading.local()


@contextlib.contextmanager
def scaled(scale: float) -> Iterator[None]:
    """Inside, the gradients of shards that are taken are `scale` times the sum over ranks."""
    before, _taken.scale = gradient_scale(), scale
    try:
        yield
    finally:
        _taken.scale = before


def gradient_scale() -> float:
    """What the sum over ranks is multiplied by; 1 outside of `scaled`."""
    return float(getattr(_taken, "scale", 1.0))


def summed(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(values, indices), each row once: its sum, in the order of first appearance."""
    if is_distinct(indices):
        return values, indices
    rows, positions = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, positions, tf.size(rows)), rows


def mark_distinct(indices: tf.Tensor) -> tf.Tensor:
    """Notes that no row is in `indices` twice."""
    state_of(indices.graph).distinct_indices.add(indices.name)
    return indices


def is_distinct(indices: tf.Tensor) -> bool:
    """Whether that was noted: also of a gradient whose values were altered meanwhile."""
    return indices.name in state_of(indices.graph).distinct_indices


def of_shard(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """What several ranks say of one row is summed, then scaled: one rounding less than the other
    way round.
    """
    values, rows = summed(slices.values, slices.indices)
    if gradient_scale() != 1:
        values *= tf.cast(gradient_scale(), values.dtype)
    return tf.IndexedSlices(values, mark_distinct(rows), slices.dense_shape)
