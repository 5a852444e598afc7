"""Updates of rows of shards by compiled operations, where these beat TensorFlow's own by measurement.

On one thread, 26 tables of dimension 128, a thousand rows of each: see `benchmarks/RESULTS.md`.
"""
from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.compiled import library, missing


def is_possible(*dtypes: tf.DType) -> bool:
    """Whether rows of these types can be updated here."""
    return missing() is None and all(dtype.base_dtype == tf.float32 for dtype in dtypes)


def adagrad(table: Any, accumulator: Any, rate: tf.Tensor, gradient: tf.Tensor, rows: tf.Tensor) -> tf.Operation:
    """Adagrad (Duchi, Hazan, Singer: "Adaptive subgradient methods", JMLR 2011), as `ResourceSparseApplyAdagrad` has it:

        accumulator[rows] += gradient ** 2;   table[rows] -= rate * gradient / sqrt(accumulator[rows])

    Args:
        table, accumulator: variables of a shard, float32 [R, D].
        rate: float32 scalar.
        gradient: float32 [K, D].
        rows: int64 [K], each at most once.
    """
    return library().collective_sparse_adagrad(table.handle, accumulator.handle, rate, gradient, rows)
