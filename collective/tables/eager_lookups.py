"""Looks tables up eagerly, by a function for each lookup, on whose call all ranks agree.

    table(ids), eagerly ──► a tf.function with one lookup ──► agreement, exchange, rows

All ranks make the same lookups in the same order, each with ids of its own. It costs an agreement
and an exchange for each lookup, and is for inference: no tape records it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.ops.communication import collectives
from collective.tables.table import Sharded
from collective.tensorflow_internals.graphs import pywrap_tfe, record


def rows(table: Sharded, ids: tf.Tensor, max_norm: float | None) -> tf.Tensor:
    """Returns the rows of `ids` [...]: [..., D]."""

    def look_up(ids: tf.Tensor) -> tf.Tensor:
        return tf.nn.embedding_lookup(table, ids, max_norm=max_norm)

    flat = tf.TensorSpec([None], ids.dtype)
    found = _called(
        table, ("rows", _number(max_norm), ids.dtype), look_up, [flat], [tf.reshape(ids, [-1])]
    )
    return tf.reshape(found, [*ids.shape, table.dim])


def pooled(
    table: Sharded,
    ids: tf.SparseTensor,
    weights: tf.SparseTensor | None,
    combiner: str,
    max_norm: float | None,
) -> tf.Tensor:
    """Returns the combined rows of each sample of `ids` [B, K]: [b, D], b <= B.

    Raises:
        NotImplementedError: a tape records `weights`, whose gradient would be lost.
    """

    def look_up(ids: tf.SparseTensor, weights: tf.SparseTensor | None = None) -> tf.Tensor:
        return tf.nn.embedding_lookup_sparse(
            table, ids, weights, combiner=combiner, max_norm=max_norm
        )

    given = [ids] if weights is None else [ids, weights]
    if weights is not None and pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes([weights.values]):
        raise NotImplementedError(
            f"table '{table.op.name}' is looked up eagerly with weights that a tf.GradientTape "
            "records, and their gradient would be lost. Take it inside a tf.function."
        )
    specs = [tf.SparseTensorSpec([None, None], x.dtype) for x in given]
    key = ("pooled", combiner, _number(max_norm), *(x.dtype for x in given))
    return _called(table, key, look_up, specs, given)


def _called(
    table: Sharded,
    key: tuple[Any, ...],
    look_up: Callable[..., tf.Tensor],
    specs: list[Any],
    inputs: list[Any],
) -> tf.Tensor:
    """Calls a table's function for lookups of one kind, which is made at its first."""
    if collectives.size() > 1 and threading.current_thread().name.startswith("Dummy-"):
        # The call that waits for it holds all others.
        raise NotImplementedError(
            f"table '{table.op.name}' is looked up in a tf.py_function or a thread of TensorFlow's "
            "own, where ranks can't agree. Look it up in the tf.function itself."
        )
    functions = table.__dict__.setdefault("_eager_lookups", {})
    if key not in functions:
        look_up.__name__ = re.sub(r"\W", "_", f"lookup in {table.op.name}")
        functions[key] = tf2.function(look_up, input_signature=specs, autograph=False)
    with record.stop_recording():
        found: tf.Tensor = functions[key](*inputs)
    return found


def _number(max_norm: Any) -> float | None:
    return None if max_norm is None else float(max_norm)
