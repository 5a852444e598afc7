"""Detects, where ranks begin to train or evaluate, that all of them are given the same records.

They are if all have the same arrays, or datasets that give all of the same arrays: nothing in them
chooses, draws, or depends on the rank. Of other datasets nothing is known here: in a graph their
first batches are compared (`collective.monitoring.input_check`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.data import dataset_analysis, source_digest
from collective.ops.communication import collectives

# Of eager datasets that give all records that they are given, and no others. (Those that shuffle
# begin with `_Shuffle`.)
_KEEPS = (
    *("_Batch", "_Cache", "_Map", "_Options", "_Padded", "_Parallel", "_Prefetch", "_Repeat"),
    *("_Shuffle", "_TensorSlice", "_Tensor", "_Zip"),
)

_MOST_ROWS = 1 << 12  # of an array, from all over it, by which it is told from others


def digest_of_all(x: Any) -> int | None:
    """Returns 63 bits of all records that `fit` or `evaluate` is given; None if they are unknown.

    Args:
        x: arrays in any structure, or a dataset.
    """
    if isinstance(x, (tf.data.Dataset, tf2.data.Dataset)):
        return _of_dataset(x)
    arrays = tf.nest.flatten(x)
    known = all(isinstance(array, np.ndarray) and array.ndim for array in arrays)
    return _of_arrays([arrays]) if arrays and known else None


def _of_dataset(dataset: Any) -> int | None:
    parts = dataset_analysis.eager_parts(dataset)
    kinds = [type(p).__name__ for p in parts if not isinstance(p, tf.data.Dataset)]
    if not kinds or not all(kind.startswith(_KEEPS) for kind in kinds):
        return None
    if dataset_analysis.shuffles_differently(dataset) or dataset_analysis.calls_python(dataset):
        return None  # A rank may find its own records so.
    functions = dataset_analysis.functions_digest(dataset)
    return _of_arrays(dataset_analysis.eager_sources(dataset), functions)


def _of_arrays(sources: Sequence[Sequence[Any]], functions: int = 0) -> int | None:
    digests = [source_digest.of_arrays(source, _MOST_ROWS) for source in sources]
    orders = [digest.reading.marks[-1].order for digest in digests if digest is not None]
    return dataset_analysis.digest_of(f"{functions} {orders}".encode()) if orders else None


def warn(given: str) -> None:
    """Warns that all ranks train on the same records.

    Args:
        given: what is the same, as the subject of a sentence.
    """
    ranks = collectives.size()
    warnings.warn(
        f"every rank trains on the same records: {given} the same on all {ranks} ranks. Training "
        f"continues, but each record counts {ranks} times in a pass over the data, and no step is "
        "of more records than one rank's. Let each rank read a part of its own: dataset = "
        "strategy.shard(dataset), before shuffle() and batch(), and then "
        "dataset.batch(B // strategy.world_size()), where B is the batch of all ranks together. If "
        "the ranks are meant to read the same, "
        "warnings.filterwarnings('ignore', 'every rank trains') silences this.",
        UserWarning,
        stacklevel=3,
    )


def warn_of_evaluation(name: str) -> None:
    """Warns that all ranks evaluate the same records.

    Args:
        name: of the evaluation.
    """
    warnings.warn(
        f"every rank evaluates the same records: {name} has the same on all {collectives.size()} "
        "ranks, so that metrics count each of them as often. Give each rank its part: "
        "strategy.shard(dataset) before batch(). If the ranks are meant to evaluate the same, "
        "warnings.filterwarnings('ignore', 'every rank evaluates') silences this.",
        UserWarning,
        stacklevel=3,
    )
