"""Trains DLRM on clicks by Keras's `fit`: the model of train.py.

COLLECTIVE_STRATEGY=hb collective launch -np 2 modelzoo/dlrm/fit.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow.compat.v2 as tf

from common import click_fit
from common.click_log import CATEGORICAL, DENSE
from common.click_model import levels
from common.click_options import ClickOptions
from dlrm.train import BOTTOM, TOP, Dlrm, interactions


def make_model(options: ClickOptions, table_rows: tuple[int, ...]) -> Any:
    features = {
        "dense": tf.keras.Input([DENSE], name="dense"),
        "categorical": tf.keras.Input([CATEGORICAL], dtype=tf.int64, name="categorical"),
    }
    counts = click_fit.network(levels(features), (*BOTTOM, options.dim), "bottom")
    rows = click_fit.embedded(features["categorical"], range(CATEGORICAL), table_rows, options.dim)
    vectors = tf.stack([counts, *rows], axis=1)
    hidden = click_fit.network(tf.concat([counts, interactions(vectors)], axis=1), TOP, "top")
    return tf.keras.Model(features, tf.keras.layers.Dense(1, "sigmoid", name="click")(hidden))


if __name__ == "__main__":
    metrics = [
        tf.keras.metrics.AUC(2000, name="auc"),
        tf.keras.metrics.BinaryCrossentropy(name="log_loss"),
    ]
    sys.exit(click_fit.main(Dlrm, make_model, {"loss": "binary_crossentropy", "metrics": metrics}))
