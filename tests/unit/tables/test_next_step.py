"""How many global steps a run can count is read off its graph, or isn't known."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import control_flow_util

from collective.tables.policies import next_step


def minimize(step, name="x"):
    x = tf.get_variable(name, initializer=1.0)
    return tf.train.GradientDescentOptimizer(0.1).minimize(x * x, global_step=step)


def two_optimizers(step):
    return minimize(step), minimize(step, "y")


def averaged(step):
    average = tf.train.ExponentialMovingAverage(0.9, step)
    with tf.control_dependencies([minimize(step)]):
        average.apply(tf.trainable_variables())


def saved_and_read(step):
    minimize(step)
    tf.train.Saver()
    tf.train.exponential_decay(0.1, step, 10, 0.5)
    tf.get_variable("copy", initializer=np.int64(0)).assign(step)
    tf.train.Scaffold().finalize()  # It has a branch that reads the step.


def in_a_branch(step):
    with tf.control_dependencies([tf.constant(0)]):
        tf.cond(step > 3, lambda: step.assign_add(2), lambda: step.assign_add(3))


def in_a_loop(step):
    def body(i):
        with tf.control_dependencies([step.assign_add(1)]):
            return i + 1

    tf.while_loop(lambda i: i < 3, body, [0])


def in_a_function(step):
    tf.function(lambda: step.assign_add(1))()


def backwards(step):
    return step.assign_sub(1), step.assign_add(-2), step.assign_add(3)


CASES = {
    "nothing": (lambda step: None, 0),
    "optimizer": (minimize, 1),
    "optimizers": (two_optimizers, 2),
    "averages": (averaged, 1),
    "reads": (saved_and_read, 1),
    "add": (lambda step: step.assign_add(5), 5),
    "backwards": (backwards, 3),
    "branch": (in_a_branch, 5),
    "branch of version 2": (in_a_branch, None),
    "loop": (in_a_loop, None),
    "loop of version 2": (in_a_loop, None),
    "function": (in_a_function, None),
    "value": (lambda step: step.assign(step + 1), None),
    "fed": (lambda step: step.assign_add(tf.placeholder(tf.int64, [])), None),
    "count up": (lambda step: tf.count_up_to(step, 9), None),
}


BY_REFERENCE = [case for case in CASES if not case.startswith(("branch", "loop", "function"))]


@pytest.mark.parametrize(
    "case, resource",
    [*((case, True) for case in CASES), *((case, False) for case in BY_REFERENCE)],
)
def test_what_a_run_counts(case, resource, monkeypatch):
    build, most = CASES[case]
    is_v2 = case not in ("branch", "loop")
    monkeypatch.setattr(control_flow_util, "ENABLE_CONTROL_FLOW_V2", is_v2)
    with tf.Graph().as_default() as graph:
        with tf.variable_scope("", use_resource=resource):
            step = tf.train.get_or_create_global_step()
            assert next_step.most_counted(graph) == 0
            build(step)
    assert next_step.most_counted(graph) == most


def test_without_a_step_nothing_is_known():
    with tf.Graph().as_default() as graph:
        assert next_step.most_counted(graph) is None
