"""Compares the sources of a dataset of single records: arrays in memory, and names of files.

A function for each record would cost more than reading it (`order_digest` is for batches). What
Python has ordered is in the graph: the arrays of `from_tensor_slices`, lists of files. Their values
are known when the dataset is made; if they are fed, or variables, they are read when an iterator
starts. Arrays with more than `MOST_ROWS` rows are sampled. Of a file's path only the last part
counts, because each host may have its own folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.data import dataset_analysis
from collective.data.order_digest import MOST_ROWS, Mark, Reading
from collective.ops.graph import graph_analysis

# The operations that read what Python gives them.
_ARRAYS = frozenset({"TensorSliceDataset", "TensorDataset"})
_FILES = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset")
_FEWEST_VALUES = 2


@dataclasses.dataclass(frozen=True)
class SourceDigest:
    """Knows the digest of the arrays of one operation.

    Attributes:
        tensors: the names of the arrays.
        reading: of them, which is the same in all sessions.
    """

    tensors: tuple[str, ...]
    reading: Reading

    def read(self, session: Any) -> Reading:
        """Returns what was seen on this rank, as `OrderDigest.read` does."""
        del session
        return self.reading


def has_cheap_elements(dataset: Any) -> bool:
    """Tells whether elements of a graph's dataset are records that aren't made by a Python
    function.

    Batches of records, by their shapes, are not such; each of them has many records.
    """
    for part in tf.nest.flatten(dataset.element_spec):
        shape = getattr(part, "shape", None)
        if shape is None or shape.rank is None or (shape.rank and shape[0] is None):
            return False
    if tf.executing_eagerly():
        return not dataset_analysis.calls_python(dataset)
    graph = tf.get_default_graph()
    return not any(
        graph_analysis.has_inside(graph, op, dataset_analysis.PYTHON.__contains__)
        for op in dataset_analysis.operations(dataset)
    )


def of_sources(dataset: Any) -> tuple[list[SourceDigest], dict[str, tf.Tensor]]:
    """Returns the sources of a dataset; of an eager one arrays alone.

    Returns:
        The digests of what is known; and by name what isn't, as it is fed or in a variable.
    """
    if tf.executing_eagerly():
        sources = dataset_analysis.eager_sources(dataset)
        return [digest for source in sources if (digest := of_arrays(source)) is not None], {}
    digests, unknown = [], {}
    for op in sorted(dataset_analysis.operations(dataset), key=lambda op: op._id):
        if op.type not in _ARRAYS and not op.type.startswith(_FILES):
            continue
        arrays = {}
        for x in op.inputs:
            value = tf.get_static_value(x)
            if value is None:
                unknown[str(x.op.name)] = x
            elif _counts(value):
                arrays[str(x.op.name)] = value
        if arrays:
            digests.append(SourceDigest(tuple(arrays), _reading(list(arrays.values()))))
    return digests, unknown


def of_arrays(arrays: Sequence[Any], most_rows: int = MOST_ROWS) -> SourceDigest | None:
    """Returns the digest of arrays, or of eager tensors; None if they have no order.

    Args:
        arrays: of any shapes.
        most_rows: of an array, from all over it, that count.
    """
    every = [np.asarray(x) for x in arrays]
    values = {f"array {i}": x for i, x in enumerate(every) if _counts(x)}
    return (
        SourceDigest(tuple(values), _reading(list(values.values()), most_rows)) if values else None
    )


def _counts(array: Any) -> bool:
    """Tells whether an array has an order."""
    return np.size(array) >= _FEWEST_VALUES


def _reading(arrays: list[np.ndarray], most_rows: int = MOST_ROWS) -> Reading:
    hashes = [_hashes(array, most_rows) for array in arrays]
    rows = len(arrays[0]) if arrays[0].shape else 1
    mark = Mark(
        1,
        rows,
        rows,
        [_number(b"".join(each)) for each in hashes],
        [_number(b"".join(sorted(each))) for each in hashes],
        [sum(a != b for a, b in zip([b"", *each], each)) for each in hashes],
    )
    return Reading([mark], mark)


def _hashes(array: np.ndarray, most_rows: int) -> list[bytes]:
    """Returns a hash of each row that counts."""
    rows = np.asarray(array)
    rows = rows.reshape(len(rows), -1) if rows.shape else rows.reshape(1, 1)
    rows = rows[:: -(-len(rows) // most_rows)] if len(rows) else rows
    if rows.dtype == object:
        values = [b"\0".join(os.path.basename(tf.compat.as_bytes(x)) for x in row) for row in rows]
    else:
        values = [row.tobytes() for row in np.ascontiguousarray(rows)]
    return [hashlib.blake2b(value, digest_size=8).digest() for value in values]


def _number(content: bytes) -> int:
    return dataset_analysis.digest_of(content)
