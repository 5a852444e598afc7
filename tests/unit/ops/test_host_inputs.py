"""Checks which operations are kept on the host: those that compute of data alone."""

from __future__ import annotations

import pytest
import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_state
from collective.ops.graph.host_inputs import keep_on_host
from collective.ops.graph.seen_operations import SeenOperations

CPU = "/device:CPU:0"


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as made:
        yield made


def data() -> tf.Tensor:
    return tf.placeholder(tf.int64, [None])


def test_what_computes_of_data_alone_is_on_the_host():
    ids = data()
    pruned = tf.boolean_mask(ids, ids > 3)
    unrelated = tf.identity(ids)
    keep_on_host([pruned + 1])
    assert ids.device == pruned.device == CPU and not unrelated.device


def test_what_needs_a_variable_stays():
    """All of it: what it takes of the data would be copied to the GPU one by one."""
    ids, variable = data(), tf.get_variable("v", [9], tf.int64, use_resource=True)
    other = ids - 1
    looked_up = tf.gather(variable, shifted := other + 1)
    keep_on_host([argument := looked_up * 2, other])
    assert other.device == CPU
    for x in (shifted, looked_up, argument, variable.handle):
        assert not x.device


def test_what_a_script_has_placed_stays():
    with tf.device("/gpu:0"):
        on_gpu = data() + 1
    with tf.device("/job:worker/task:1"):
        of_worker = data() + 1
    variable = tf.get_variable("v", [9], use_resource=True)
    with tf.get_default_graph().colocate_with(variable.handle.op):
        unrelated = data() + 1
    keep_on_host([later := on_gpu + 1, of_worker, unrelated])
    assert on_gpu.device == "/device:GPU:0" and not later.device and not unrelated.device
    assert of_worker.device == f"/job:worker/task:1{CPU}"


def test_what_it_merely_waits_for_does_not_matter():
    variable = tf.get_variable("v", [9], use_resource=True)
    with tf.control_dependencies([variable.initializer, other := data() + 1]):
        number = tf.constant(0.5)
    keep_on_host([number])
    assert number.device == CPU and not variable.initializer.device and not other.device


def test_what_a_session_has_seen_stays(graph: tf.Graph):
    """TensorFlow refuses to run it, once it was changed."""
    ids = data()
    with tf.Session() as session:
        session.run(ids, {ids: [1]})
        graph_state.of(graph, SeenOperations).last = ids.op._id
        keep_on_host([more := ids + 1])
        assert not ids.device and more.device == CPU
        assert session.run(more, {ids: [1]}).tolist() == [2]
