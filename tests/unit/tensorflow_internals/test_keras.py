"""Keras 2 trains; Keras 3, which TensorFlow brings from 2.16 on, is refused by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from collective.tensorflow_internals import keras
from collective.wrappers.keras import refuse_keras_3

PROGRAM = """
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy
import keras

def build(layers):
    with CollectiveStrategy().scope(), tf.Graph().as_default():
        layers.Dense(1)(tf.placeholder(tf.float32, [None, 4]))

build(tf.keras.layers)
try:
    build(keras.layers)
except NotImplementedError as error:
    print(error)
keras.layers.Dense(1)
"""


def test_its_refusal_says_what_to_use():
    with pytest.raises(NotImplementedError, match="object is of Keras .*`import tf_keras`"):
        refuse_keras_3(print, object())


def test_layers_of_keras_3_are_refused_in_a_scope_only():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = "Dense is of Keras 3" if keras.PACKAGE == "tf_keras" else ""
    assert done.stdout.startswith(said) and bool(done.stdout) == bool(said)
