"""Tells whether all ranks compute a loss together, so that they may exchange numbers for it."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from collective.ops.graph import graphs
from collective.replication import cross_replica
from collective.tables import traced_lookups
from collective.wrappers import keras_eager_steps, keras_functions


def is_own() -> bool:
    """Tells whether the loss may be one that this rank computes alone."""
    if cross_replica.is_alone():
        return True
    graph = tf.get_default_graph()
    if tf.executing_eagerly():
        return not (keras_eager_steps.is_inside() or graphs.is_recorded())
    outermost = graphs.outermost(graph)
    needs_all = graphs.is_recorded() or keras_functions.is_evaluating()
    has_tables = bool(traced_lookups.lookups_in(outermost))
    return graphs.is_traced(outermost) and not needs_all and not has_tables
