"""Adds the sizes of tables to TensorFlow's error that memory is exhausted."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import kernel_device
from collective.ops.counting import counted
from collective.tables.table import Sharded

MOST_NAMED = 5


def add_table_sizes(error: tf.errors.ResourceExhaustedError, graph: tf.Graph) -> None:
    """Adds the sizes of the tables of `graph` on this rank to the error of a run.

    A message that already names them, or the settings of a GPU's memory, is left unchanged.
    """
    text = _tables(graph)
    known = (text, kernel_device.DYNAMIC, kernel_device.SHARE_OPTION)
    if text and not any(words in error.message for words in known):
        error._message = f"{error.message}\n{text}"


def _tables(graph: tf.Graph) -> str:
    sizes = sorted(
        (
            (v.shard_shape.num_elements() * v.dtype.size, v.op.name)
            for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
            if isinstance(v, Sharded) and v.rows is not None
        ),
        reverse=True,
    )
    if not sizes:
        return ""
    named = ", ".join(f"'{name}' {size:,}" for size, name in sizes[:MOST_NAMED])
    rest = f" and {counted(len(sizes) - MOST_NAMED, 'other')}" if len(sizes) > MOST_NAMED else ""
    return (
        f"Tables and their slots take {sum(size for size, _ in sizes):,} bytes on this rank: "
        f"{named}{rest}; dynamic ones what their rows take.{_advice()} Train on more ranks, each "
        "holds its share."
    )


def _advice() -> Any:
    if kernel_device.chosen() != "gpu":
        return ""
    share = f"{100 * kernel_device.TENSORFLOW_SHARE:.0f} %"
    return (
        f" TensorFlow may have {share} of the GPU's memory, unless "
        f"config.{kernel_device.SHARE_OPTION} of the session says otherwise."
    )
