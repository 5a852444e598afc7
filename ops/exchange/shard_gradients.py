"""Builds the gradient of a shard: `IndexedSlices` with each row once, scaled to the ranks' mean."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_state

_scales = threading.local()


@dataclasses.dataclass
class DistinctIndices:
    """Records the names of a graph's indices that are known to have no row twice."""

    names: set[str] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def scaled(scale: float) -> Iterator[None]:
    """Makes the gradients of shards taken inside `scale` times the sum over ranks."""
    previous, _scales.scale = getattr(_scales, "scale", None), scale
    try:
        yield
    finally:
        _scales.scale = previous


def gradient_scale() -> float:
    """Returns the factor of the sum over ranks; 1 outside of `scaled`."""
    scale = getattr(_scales, "scale", None)
    return 1.0 if scale is None else float(scale)


def is_taken() -> bool:
    """Tells whether gradients are taken now, in `scaled`."""
    return getattr(_scales, "scale", None) is not None


def summed(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (values, indices) with each row once: its sum, in the order of first appearance."""
    if is_distinct(indices):
        return values, indices
    rows, positions = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, positions, tf.size(rows)), rows


def mark_distinct(indices: tf.Tensor) -> tf.Tensor:
    """Notes that `indices` have no row twice, and returns them."""
    graph_state.of(indices.graph, DistinctIndices).names.add(indices.name)
    return indices


def is_distinct(indices: tf.Tensor) -> bool:
    """Tells whether `indices` are known to have no row twice.

    The gradient that has these indices may have had its values changed since.
    """
    if tf.executing_eagerly():
        return False
    return indices.name in graph_state.of(indices.graph, DistinctIndices).names


def of_shard(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the gradients that several ranks give for one row, then scales them.

    That needs one rounding less than the opposite order.
    """
    values, rows = summed(slices.values, slices.indices)
    if gradient_scale() != 1:
        values *= tf.constant(gradient_scale(), values.dtype)
    return tf.IndexedSlices(values, mark_distinct(rows), slices.dense_shape)
