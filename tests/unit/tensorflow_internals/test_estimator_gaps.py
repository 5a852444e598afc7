"""Estimators work where TensorFlow no longer has what they expect of it, as from 2.16 on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

GONE = """
import importlib.machinery, sys
import tensorflow.compat.v1 as tf
from tensorflow.python.util import tf_export

gone = [
    "tensorflow.python.distribute.estimator_training",
    *(f"tensorflow.python.tpu.{name}" for name in ("session_support", "tpu_embedding")),
    "tensorflow.python.tpu.tpu_embedding_gradient",
]
for name in gone:
    sys.modules.pop(name, None)
    parent, _, last = name.rpartition(".")
    vars(sys.modules.get(parent, tf)).pop(last, None)
assert not [name for name in sys.modules if name.startswith("tensorflow_estimator")]


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in gone else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
if hasattr(tf_export, "ESTIMATOR_API_NAME"):
    del tf_export.ESTIMATOR_API_NAME
    del tf_export.API_ATTRS["estimator"], tf_export.API_ATTRS_V1["estimator"]
"""
PROGRAM = """
from collective.tensorflow_internals import estimators
from tensorflow_estimator.python.estimator.model_fn import EstimatorSpec

def model_fn(features, labels, mode):
    w = tf.get_variable("w", [], initializer=tf.ones_initializer())
    step = tf.train.get_global_step()
    train = tf.train.GradientDescentOptimizer(0.5).minimize(w * features, global_step=step)
    return EstimatorSpec(mode, loss=w * features, train_op=train)

def input_fn():
    return tf.data.Dataset.from_tensors(1.0).repeat(3)

estimator = estimators.estimator.Estimator(model_fn, model_dir=sys.argv[1])
estimator.train(input_fn)
print(estimator.get_variable_value("w"), estimator.evaluate(input_fn)["global_step"])
from tensorflow.python.tpu.tpu_embedding import AdagradParameters
for refused in (
    lambda: estimators.run_config.RunConfig(train_distribute=tf.distribute.get_strategy()),
    lambda: AdagradParameters(0.1),
):
    try:
        refused()
    except NotImplementedError as error:
        print(error)
"""


@pytest.mark.slow
def test_estimators_train_without_what_is_gone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", GONE + PROGRAM, str(tmp_path)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values, strategy, tpus = done.stdout.splitlines()
    assert values == "-0.5 3"
    assert strategy.startswith("An Estimator with a strategy of tf.distribute is not supported")
    assert tpus.startswith("AdagradParameters is not supported")


@pytest.mark.slow
def test_without_the_stand_ins_they_cannot_be_imported():
    done = subprocess.run(
        [sys.executable, "-c", GONE + "import tensorflow_estimator"],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "cannot import name 'estimator_training'" in done.stderr
