"""Finds and counts rows of dynamic tables where compiled operations don't: if these are missing,
and on a device for a single lookup. Finds the keys of rows, which only a script's own code needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.graph import device_scopes
from collective.tables.rows import row_store


def find(
    number: tf.Tensor, keys: tf.Tensor, insert: tf.Tensor, step: tf.Tensor | None
) -> tf.Tensor:
    """Returns the local rows of `keys` [K] in the store of this number, int64 [K].

    Args:
        number: int64 scalar.
        keys: int64.
        insert: bool scalar; new keys are inserted, or have row 0.
        step: the step of an insertion, int64 scalar, for a store on a device; else None.
    """
    inputs = [number, keys, insert, *([] if step is None else [step])]
    with device_scopes.on_host():
        rows = tf.numpy_function(_find, inputs, tf.int64, stateful=True)
    rows.set_shape(keys.shape)
    return rows


def noted_step(last_used: Any) -> tf.Tensor:
    """Returns the step that a hash table notes with a use, int64 scalar; 0 if it isn't needed.

    Args:
        last_used: the table's `LastUse`, or None.
    """
    if last_used is None:
        with device_scopes.on_host():
            return tf.zeros([], tf.int64)
    step: tf.Tensor = last_used.noted_step()
    return step


def count(number: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows in the store of this number, after the control dependencies."""
    with device_scopes.on_host():
        counted = tf.numpy_function(_count, [tf.identity(number)], tf.int64, stateful=True)
    counted.set_shape([])
    return counted


def keys_of(number: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns the keys of local rows [K] in the store of this number, int64 [K].

    Row 0, which unknown keys have outside of training, gives -1.
    """
    with device_scopes.on_host():
        keys = tf.numpy_function(_keys_of, [number, rows], tf.int64, stateful=True)
    keys.set_shape(rows.shape)
    return keys


def rows_of(number: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Returns the local rows of keys [K] that have one in the store of this number, int64 [K].

    A run in which a key has no row fails.
    """
    with device_scopes.on_host():
        rows = tf.numpy_function(_rows_of, [number, keys], tf.int64, stateful=True)
    rows.set_shape(keys.shape)
    return rows


def _keys_of(number: np.ndarray, rows: np.ndarray) -> np.ndarray:
    keys = np.full(rows.shape, -1, np.int64)
    known = rows > 0
    keys[known] = row_store.registered(int(number)).all_keys()[rows[known] - 1]
    return keys


def _rows_of(number: np.ndarray, keys: np.ndarray) -> np.ndarray:
    rows: np.ndarray = row_store.registered(int(number)).locate(keys)
    if (rows < 1).any():
        raise ValueError(
            f"key {keys[rows < 1][0]} of a gradient has no row in the memory of this rank."
        )
    return rows


def _find(
    number: np.ndarray, keys: np.ndarray, insert: np.ndarray, *step: np.ndarray
) -> np.ndarray:
    return row_store.registered(int(number)).rows(keys, bool(insert), *map(int, step))


def _count(number: np.ndarray) -> np.int64:
    return np.int64(len(row_store.registered(int(number))))
