"""Tables know the initializers of every Keras that is installed: they fill single rows."""

import importlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

import collective  # noqa: F401  It chooses the Keras of `tf.keras`.
from collective.tables.rows import initializers

NAMES = (
    "Constant GlorotNormal GlorotUniform HeNormal HeUniform LecunNormal Ones RandomNormal "
    "RandomUniform TruncatedNormal Zeros"
).split()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("package", ["tf.keras", "keras"])
def test_initializers_of_keras_fill_single_rows(package, name):
    of = tf2.keras if package == "tf.keras" else importlib.import_module("keras")
    init = getattr(of.initializers, name)()
    with tf.Graph().as_default():
        fill = initializers.by_row(init, (30, 8), "t")
    assert fill is not None
    numbers = np.arange(30, dtype=np.uint64)
    np.testing.assert_array_equal(fill(numbers, 8)[7:9], fill(numbers[7:9], 8))
