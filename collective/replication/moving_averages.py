"""Keeps moving averages, for which TensorFlow has functions of its own.

Averages of variables need no exchange: replicated variables are already the same on all ranks, and
the average of a table is sharded like the table. Averages of tensors (a loss; the mean of a batch
in batch normalisation, where each rank normalises by its own batch) use the mean of the ranks'
tensors, so that they stay the same on all ranks, too.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.replication.assignments import mean_over_ranks
from collective.tables import dense_view
from collective.tables.table import Sharded, shard_view


def assign_moving_average(
    original: Any, variable: Any, value: Any, decay: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `moving_averages.assign_moving_average`: averages the mean over ranks."""
    return original(variable, mean_over_ranks(variable, value), decay, *args, **kwargs)


def of_layer(original: Any, layer: Any, variable: Any, value: Any, *args: Any) -> Any:
    """Stands in for `BatchNormalization._assign_moving_average` and `_assign_new_value`."""
    return original(layer, variable, mean_over_ranks(variable, value), *args)


def apply_average(original: Any, average: Any, var_list: Any = None) -> tf.Operation:
    """Stands in for `ExponentialMovingAverage.apply`: shards the average of a table, too."""
    variables = tf.trainable_variables() if var_list is None else list(var_list)
    tables = [v for v in variables if isinstance(v, Sharded)]
    for table in tables:
        if table.rows is None:
            table.refuse("tf.train.ExponentialMovingAverage")
    if collectives.size() == 1 or not tables:
        return original(average, var_list)
    with tf.control_dependencies([dense_view.agreed(tables[0], average.name)]), shard_view():
        return original(average, variables)
