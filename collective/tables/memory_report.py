"""What is said where TensorFlow has no memory left: which tables there are, and what they take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import placement
from collective.tables.table import Sharded

MOST = 5  # named


@contextlib.contextmanager
def adding_table_sizes(graph: tf.Graph) -> Iterator[None]:
    """Adds to a `ResourceExhaustedError` of a run what the tables of `graph` take on this rank,
    unless it says so itself.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        text = _tables(graph)
        if text and not any(
            said in error.message for said in (text, placement.DYNAMIC, placement.WORKSPACE)
        ):
            error._message = f"{error.message}\n{text}"
        raise


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
    named = ", ".join(f"'{name}' {size:,}" for size, name in sizes[:MOST])
    rest = f" and {len(sizes) - MOST} others" if len(sizes) > MOST else ""
    return (
        f"Tables and their slots take {sum(size for size, _ in sizes):,} bytes on this rank: "
        f"{named}{rest}; dynamic ones what their rows take.{_advice()} Train on more ranks, each "
        "holds its share."
    )


def _advice() -> Any:
    if placement.chosen() != "gpu":
        return ""
    share = 100 * placement.memory_shares()[1]
    return (
        f" TensorFlow may have {share:.0f} % of the GPU's memory, unless the session's "
        f"configuration says otherwise, and kernels the rest: see {placement.WORKSPACE}."
    )
