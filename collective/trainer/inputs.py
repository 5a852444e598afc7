"""Makes global batches of a Trainer's data, so that every number of ranks takes the same steps."""

from __future__ import annotations

import random
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.data import dataset_analysis, positions
from collective.data.positions import DataPositions
from collective.data.resumable_dataset import resumable
from collective.ops.graph import graph_state
from collective.tensorflow_internals.graphs import function_utils

DATA = "train"  # begins the names of the variables of the position

DataFunction = Callable[..., Any]


def training_input(function: DataFunction, batch: int, params: Any) -> DataFunction:
    """Returns the input_fn that repeats `function`'s records, in global batches of `batch`.

    A dataset that is resumable already stays as it is; its batches must have this size.
    """

    def input_fn(mode: Any, config: Any) -> Any:
        dataset = _call(function, mode, params, config)
        _check_dataset(function, dataset)
        if dataset_analysis.is_resumable(dataset):
            _check_batch(batch)
            return dataset
        if hasattr(dataset, "collective_records"):  # it seeks, and repeats by itself
            _check_epochs(dataset.collective_records.epochs)
            return resumable(dataset, batch, name=DATA)
        return resumable(dataset.repeat(), batch, name=DATA).prefetch(1)

    return input_fn


def evaluation_input(function: DataFunction, batch: int, params: Any) -> DataFunction:
    """Returns the input_fn that deals batches of `function`'s records, the same for every N.

    A dataset whose batches are made and dealt already (`collective.data.parquet`, `resumable`)
    stays as it is.
    """

    def input_fn(mode: Any, config: Any) -> Any:
        dataset = _call(function, mode, params, config)
        _check_dataset(function, dataset)
        records = getattr(dataset, "collective_records", None)
        if dataset_analysis.is_resumable(dataset):
            return dataset
        return dataset if hasattr(records, "deduplicate") else dataset.batch(batch)

    return input_fn


def count_records(function: DataFunction, params: Any) -> int | None:
    """Returns how many records an epoch of `function`'s data has; None if TensorFlow can't tell.

    It builds the dataset once more, in a graph of its own, and draws no random numbers for that.

    Raises:
        ValueError: it has no end.
    """
    states = random.getstate(), np.random.get_state()
    try:
        with tf.Graph().as_default(), positions.without_positions():
            dataset = _call(function, "train", params, None)
            _check_dataset(function, dataset)
            if hasattr(dataset, "collective_records"):
                return int(dataset.collective_records.records)
            if dataset_analysis.is_resumable(dataset):
                return None
            count = tf2.data.experimental.cardinality(dataset)
            with tf.Session(config=tf.ConfigProto(device_count={"GPU": 0})) as session:
                found = int(session.run(count))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    if found == tf2.data.experimental.INFINITE_CARDINALITY:
        raise ValueError(
            f"the dataset of {_name(function)} has no end, so it has no epochs. Leave repeat() "
            "out: the Trainer repeats it. Or give the Trainer records_per_epoch."
        )
    return found if found >= 0 else None


def takes(function: Any, argument: str) -> bool:
    """Tells whether a function has an argument of this name."""
    return argument in function_utils.fn_args(function)


def _call(function: DataFunction, mode: Any, params: Any, config: Any) -> Any:
    """Calls a function of data with those of the arguments that it names, as an Estimator does."""
    given = {"mode": mode, "params": params, "config": config}
    names = function_utils.fn_args(function)
    unknown = [name for name in names if name not in given]
    if "input_context" in unknown:
        raise ValueError(
            f"{_name(function)} takes input_context, but the Trainer deals global batches itself: "
            "return all records, without it."
        )
    return function(**{name: value for name, value in given.items() if name in names})


def _check_dataset(function: DataFunction, dataset: Any) -> None:
    if not isinstance(dataset, tf2.data.Dataset):
        raise TypeError(
            f"{_name(function)} returned {type(dataset).__name__}; a Trainer's data are a "
            "tf.data.Dataset of single records, not batches."
        )


def _check_batch(batch: int) -> None:
    """Refuses a resumable dataset whose global batches have another size."""
    sizes = graph_state.of(tf.get_default_graph(), DataPositions).batch_sizes
    if None in sizes:
        raise ValueError(
            f"global_batch_size is {batch}, but the stream of training doesn't say how many "
            f"samples its batches have: collective.data.stream(batch_size={batch})."
        )
    if set(sizes) != {batch}:
        raise ValueError(
            f"global_batch_size is {batch}, but the resumable dataset of training has batches of "
            f"{', '.join(map(str, sizes))} records. Give both the same."
        )


def _check_epochs(epochs: int | None) -> None:
    if epochs is not None:
        raise ValueError(
            f"the training data end after epochs={epochs}, but max_length says when training ends: "
            "give collective.data.parquet() or records() epochs=None."
        )


def _name(function: DataFunction) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
