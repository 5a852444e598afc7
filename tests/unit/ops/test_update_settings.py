"""What ranks compare of their updates doesn't depend on the order in which a rank finds them."""

import tensorflow.compat.v1 as tf

from collective.ops.graph.update_settings import described


def test_several_updates_of_a_variable_are_all_described():
    with tf.Graph().as_default() as graph:
        w = tf.get_variable("w", [2], use_resource=True)
        for optimizer in (
            tf.train.AdagradOptimizer(0.3),
            tf.train.GradientDescentOptimizer(0.1),
        ):
            optimizer.minimize(tf.reduce_sum(w))
        found = graph.get_operations()
    several = described(found, [w])
    assert several == described(found[::-1], [w])
    assert [each for each in several if "0.3" in each] and [
        each for each in several if "0.1" in each
    ]
