"""Builds the served graph: rows come in as the census has them, and TensorFlow encodes them."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from census_income import model
from census_income.columns import CATEGORICAL, NUMERIC
from census_income.features import LONG_TAILED, OUT_OF_VOCABULARY, Encoder


def placeholders() -> dict[str, tf.Tensor]:
    """Makes a placeholder [B] for each column: text, or int64."""
    placeholder_of_column = {}
    for column in (*CATEGORICAL, *NUMERIC):
        dtype = tf.string if column in CATEGORICAL else tf.int64
        placeholder_of_column[column] = tf.placeholder(dtype, [None], name=column)
    return placeholder_of_column


def encode(encoder: Encoder, rows: dict[str, tf.Tensor]) -> dict:
    """Does in TensorFlow what `Encoder.encode` does in NumPy, without the label."""
    ids = {column: _ids(encoder, column, rows[column]) for column in CATEGORICAL}
    numeric = [_numeric(encoder, column, rows[column]) for column in NUMERIC]
    return {"ids": ids, "numeric": tf.cast(tf.concat(numeric, 1), tf.float32)}


def signature(strategy, encoder: Encoder, dim: int):
    """Builds the signature for `strategy.export_saved_model`.

    It goes from a row's columns to the probability of the higher income.
    """
    rows = placeholders()
    network = model.create(strategy, encoder, dim)
    probability = tf.sigmoid(network(encode(encoder, rows)))
    return tf.saved_model.predict_signature_def(rows, {"probability": probability})


def _ids(encoder: Encoder, column: str, values: tf.Tensor) -> tf.Tensor:
    known = encoder.vocabulary[column]
    places = tf.lookup.KeyValueTensorInitializer(
        list(known), range(1, len(known) + 1), tf.string, tf.int64
    )
    return tf.lookup.StaticHashTable(places, OUT_OF_VOCABULARY).lookup(values)


def _numeric(encoder: Encoder, column: str, values: tf.Tensor) -> tf.Tensor:
    values = tf.cast(values, tf.float64)
    level = tf.log1p(values) if column in LONG_TAILED else values
    standard = (level - encoder.mean[column]) / encoder.deviation[column]
    low, high = encoder.edges[column][:-1], encoder.edges[column][1:]
    filled = tf.clip_by_value((values[:, None] - low) / (high - low), 0, 1)
    return tf.concat([standard[:, None], filled], 1)
