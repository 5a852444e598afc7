"""Whether a run trains: only then do dynamic tables take in new keys."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from collective.ops.graphs import outermost


def flag(graph: tf.Graph) -> tf.Tensor:
    """Bool scalar: True in a run that updates a table or a global variable (see
    `collective.ranks.sessions`), else False.

    One for each graph that a session runs, the same for the functions and branches in it.
    """
    graph = outermost(graph)
    if not hasattr(graph, "_collective_training"):
        with graph.as_default(), tf.init_scope(), tf.device("/cpu:0"):
            graph._collective_training = tf.placeholder_with_default(
                tf.constant(False), [], "collective/training"
            )
    made: tf.Tensor = graph._collective_training
    return made


def existing(graph: tf.Graph) -> tf.Tensor | None:
    """The flag of `graph`, if anything asked for it."""
    made: tf.Tensor | None = getattr(graph, "_collective_training", None)
    return made
