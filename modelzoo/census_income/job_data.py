"""Makes datasets for train_job.py: of its rows, or of loaders, which have the same batches."""

from __future__ import annotations

import os
from typing import Any

import tensorflow.compat.v1 as tf

from census_income import batches
from census_income.columns import LABEL
from census_income.features import Examples
from collective import data

LOADERS = "COLLECTIVE_LOADERS"  # the launcher's word for where loaders listen


def in_order(examples: Examples) -> tf.data.Dataset:
    """Returns the rows one by one."""
    return _records(examples)


def of_epochs(examples: Examples, seed: int) -> tf.data.Dataset:
    """Returns the rows one by one, without end, in the order of `batches.epochs`."""
    orders = tf.data.Dataset.from_generator(
        lambda: batches.epochs(len(examples), seed),
        output_signature=tf.TensorSpec([len(examples)], tf.int64),
    )
    return orders.flat_map(lambda order: _records(examples, order))


def of_loaders(batch: int) -> tf.data.Dataset:
    """Returns the batches that loader.py makes of the same rows in the same order."""
    return data.stream(name="train", batch_size=batch).map(_element)


def has_loaders() -> bool:
    """Tells whether the job was started with --data-loaders, or with `data_loaders` in its file."""
    return bool(os.environ.get(LOADERS))


def _records(examples: Examples, order: tf.Tensor | None = None) -> tf.data.Dataset:
    columns = ({**examples.ids, "numeric": examples.numeric}, examples.label)
    if order is not None:
        columns = tf.nest.map_structure(lambda values: tf.gather(values, order), columns)
    return tf.data.Dataset.from_tensor_slices(columns)


def _element(batch: dict[str, dict[str, Any]]) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Returns what the other datasets have; each sample has one id of a column."""
    ids = {column: ragged.values for column, ragged in batch["ids"].items()}
    return {**ids, "numeric": batch["dense"]["numeric"]}, batch["labels"][LABEL]
