"""The graph that is served: rows come in as the census has them, text and numbers, and are encoded
by TensorFlow.
"""

from __future__ import annotations

import model
import tensorflow.compat.v1 as tf
from columns import CATEGORICAL, NUMERIC
from features import LONG_TAILED, OUT_OF_VOCABULARY, Encoder


def placeholders() -> dict[str, tf.Tensor]:
    """[B] for each column: text, or int64."""
    return {
        column: tf.placeholder(
            tf.string if column in CATEGORICAL else tf.int64, [None], name=column
        )
        for column in (*CATEGORICAL, *NUMERIC)
    }


def encoded(encoder: Encoder, rows: dict[str, tf.Tensor]) -> dict:
    """What `Encoder.encode` gives for these rows, without the label."""
    return {
        "ids": {column: _ids(encoder, column, rows[column]) for column in CATEGORICAL},
        "numeric": tf.cast(
            tf.concat([_numeric(encoder, column, rows[column]) for column in NUMERIC], 1),
            tf.float32,
        ),
    }


def signature(strategy, encoder: Encoder, dim: int):
    """The signature for `strategy.export_saved_model`: from a row's columns to the probability of
    the higher income.
    """
    rows = placeholders()
    return tf.saved_model.predict_signature_def(
        rows,
        {"probability": tf.sigmoid(model.create(strategy, encoder, dim)(encoded(encoder, rows)))},
    )


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
