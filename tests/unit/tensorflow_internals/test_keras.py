"""Keras 2 trains; Keras 3, which TensorFlow brings from 2.16 on, is refused by name."""

from __future__ import annotations

import os
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


# Next to TensorFlow 2.15 tf_keras is a second package of Keras 2; later it is what tf.keras is.
MIXED = """
import tf_keras
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

with CollectiveStrategy().scope(), tf.Graph().as_default():
    tf.keras.layers.Dense(1)(tf.placeholder(tf.float32, [None, 4]))
    tf_keras.layers.Dense(1)(tf.placeholder(tf.float32, [None, 4]))
    assert tf.keras.layers.Layer is tf_keras.layers.Layer
"""


@pytest.mark.slow
@pytest.mark.parametrize("legacy", ["", "1"])
def test_two_packages_of_keras_2_are_refused_in_a_scope(legacy: str):
    done = subprocess.run(
        [sys.executable, "-c", MIXED],
        env={**os.environ, "TF_USE_LEGACY_KERAS": legacy or "0"},
        capture_output=True,
        text=True,
    )
    if legacy:
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        assert done.returncode == 1 and "TF_USE_LEGACY_KERAS=1" in done.stderr, done.stderr[-3000:]
        assert "tf_keras" in done.stderr.splitlines()[-1]


def test_its_refusal_says_what_to_use():
    with pytest.raises(NotImplementedError, match="object is of Keras .*`import tf_keras`"):
        refuse_keras_3(print, object())


@pytest.mark.slow
def test_layers_of_keras_3_are_refused_in_a_scope_only():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = "Dense is of Keras 3" if keras.PACKAGE == "tf_keras" else ""
    assert done.stdout.startswith(said) and bool(done.stdout) == bool(said)


@pytest.mark.slow
def test_what_is_imported_from_tensorflow_keras_is_keras_2():
    program = """
import tensorflow as tf
from collective import CollectiveStrategy
from tensorflow.keras import layers
from collective.tensorflow_internals.keras import package

assert layers.Dense is package.layers.Dense, layers.Dense.__module__
assert layers.Dense is tf.keras.layers.Dense
"""
    environment = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
