"""TensorFlow's optimizers by the names that command lines have for them."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

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
    return CLASSES[name](learning_rate)
