"""scope(local_steps=k) adds nothing to a checkpoint, and refuses what it cannot sum up."""

import pytest
import tensorflow.compat.v1 as tf

from tests.ranks.accumulation import D, V, network

pytestmark = pytest.mark.double


def test_variables_are_those_of_training_with_the_larger_batch(strategy):
    """So that a checkpoint is the other's start; and without local_steps nothing is added."""
    made = []
    for options in ({}, {"local_steps": 1}, {"local_steps": 2}):
        with strategy.scope(**options), tf.Graph().as_default() as graph:
            loss, _, _ = network(strategy.embedding_scope, [V, D], None, 4)
            op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_or_create_global_step())
            made.append(
                (
                    [v.name for v in tf.global_variables()],
                    [v.name for v in tf.local_variables()],
                    op.name,
                    [op.name for op in tf.get_collection(tf.GraphKeys.TRAIN_OP)],
                )
            )
            added = [op.name for op in graph.get_operations() if "local_steps" in op.name]
            assert bool(added) == (options.get("local_steps", 1) > 1)
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("version", [1, 2])
def test_an_update_inside_a_branch_is_refused(strategy, version):
    if version == 1:
        tf.disable_control_flow_v2()
    try:
        with strategy.scope(local_steps=2), tf.Graph().as_default():
            w = tf.get_variable("w", initializer=tf.zeros([]))
            optimizer = tf.train.GradientDescentOptimizer(1.0)
            gradients = optimizer.compute_gradients(w * 2.0)
            with pytest.raises(NotImplementedError, match="local_steps=2"):
                tf.cond(tf.constant(True), lambda: optimizer.apply_gradients(gradients), tf.no_op)
    finally:
        tf.enable_control_flow_v2()


def test_gradients_that_are_shared_in_part_are_refused(strategy):
    with strategy.scope(local_steps=2), tf.Graph().as_default():
        a, b, c = (tf.get_variable(name, initializer=tf.ones([])) for name in "abc")
        gradients = tf.gradients(a * b * c, [a, b, c])
        (x, y), _ = tf.clip_by_global_norm(gradients[:2], 0.1)
        tf.train.GradientDescentOptimizer(1.0).apply_gradients([(x, a)])
        with pytest.raises(ValueError, match="share all gradients"):
            tf.train.AdamOptimizer().apply_gradients([(y, b), (gradients[2], c)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2", None])
def test_the_option_is_a_whole_number(strategy, value):
    with pytest.raises(ValueError, match="local_steps"):
        strategy.scope(local_steps=value)
