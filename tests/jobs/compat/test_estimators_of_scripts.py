"""A script's Estimators, and subclasses of its own, run as they are, in scope() and outside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs import pool

# A Horovod script reads a batch of its own on each rank; scope() deals what all of them name.
SCRIPT = """
import sys
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()

def input_fn():
    records = {"x": [[1.0], [2.0], [3.0], [4.0]]}, [[2.0], [4.0], [6.0], [8.0]]
    dataset = tf.data.Dataset.from_tensor_slices(records).batch(2)
    if "outside" in sys.argv:
        dataset = dataset.shard(hvd.size(), hvd.rank())
    return dataset.repeat(8)

def model_fn(features, labels, mode, params):
    layer = tf.layers.dense(features["x"], 1, kernel_initializer=tf.ones_initializer())
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=layer)
    loss = tf.losses.mean_squared_error(labels, layer)
    optimizer = tf.train.GradientDescentOptimizer(params["rate"])
    if "outside" in sys.argv:
        optimizer = hvd.DistributedOptimizer(optimizer)
    train_op = optimizer.minimize(loss, tf.train.get_or_create_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

class Regressor(tf.estimator.Estimator):
    def __init__(self, rate, model_dir):
        super().__init__(model_fn, model_dir, params={"rate": rate})

    def weight(self):
        return self.get_variable_value("dense/kernel").item()

folder = "{folder}/%d" % hvd.rank() if "outside" in sys.argv else "{folder}"
regressor = Regressor(0.01, folder)
assert isinstance(regressor, tf.estimator.Estimator) and type(regressor).__name__ == "Regressor"
regressor.train(input_fn, max_steps=3)
print("weight", regressor.weight())

def receiver():
    inputs = {"x": tf.placeholder(tf.float32, [None, 1])}
    return tf.estimator.export.ServingInputReceiver(inputs, inputs)

regressor.export_saved_model(folder + "/exported", receiver, save_incr_model=True)

class Broken(tf.estimator.Estimator):
    def evaluate(self):
        pass

try:
    Broken(model_fn, folder)
except ValueError as error:
    print("error", error)
"""


def weights_by_hand(steps: int) -> float:
    """Returns the weight of plain gradient descent on the mean of both batches."""
    weight, bias = 1.0, 0.0
    inputs = (1.0, 2.0, 3.0, 4.0)
    for _ in range(steps):
        errors = [weight * x + bias - 2 * x for x in inputs]
        weight -= 0.01 * sum(2 * error * x for error, x in zip(errors, inputs)) / 4
        bias -= 0.01 * sum(2 * error for error in errors) / 4
    return weight


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_subclass_of_a_script(where: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{folder}", str(tmp_path / "model")))
    scope = "auto" if where == "inside" else "script"
    options = ("--as", "horovod", "--embedding-scope", scope)
    done = pool.launch("-np", 2, "--device", "cpu", *options, script, where)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        told = re.findall(rf"^\[{rank}\] weight (\S+)$", done.stdout, re.M)
        assert [float(x) for x in told] == pytest.approx([weights_by_hand(3)], rel=1e-5)
    refusals = done.stdout.count("Subclasses of Estimator cannot override members")
    assert refusals == (2 if where == "outside" else 0)
