"""Optimizers of TensorFlow and of this library, by the names that command lines have for them."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import train as collective_train

MOMENTUM = 0.9
CLASSES = {
    "adadelta": tf.train.AdadeltaOptimizer,
    "adagrad": tf.train.AdagradOptimizer,
    "adam": tf.train.AdamOptimizer,
    "ftrl": tf.train.FtrlOptimizer,
    "rmsprop": tf.train.RMSPropOptimizer,
    "sgd": tf.train.GradientDescentOptimizer,
}


def create(name: str, learning_rate: float) -> tf.train.Optimizer:
    if name == "momentum":
        return tf.train.MomentumOptimizer(learning_rate, MOMENTUM)
    if name == "adamasync":
        return collective_train.AdamAsyncOptimizer(learning_rate)
    if name == "adagraddecay":
        step = tf.train.get_or_create_global_step()
        return collective_train.AdagradDecayOptimizer(learning_rate, step)
    return CLASSES[name](learning_rate)


def create_keras(name: str, learning_rate: float) -> Any:
    """Makes the optimizer of Keras of the same name."""
    if name == "momentum":
        return tf2.keras.optimizers.SGD(learning_rate, MOMENTUM)
    config = {"learning_rate": learning_rate}
    return tf2.keras.optimizers.get({"class_name": name, "config": config})
