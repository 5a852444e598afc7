"""Moving averages, which TensorFlow keeps by functions of its own.

Those of variables need no exchange: replicated variables are alike on all ranks already, and the
average of a table is sharded as the table is. Those of tensors (a loss; the mean of a batch, in
batch normalisation, where each rank normalises by its own) are of the mean of the ranks' tensors,
so that the averages stay alike, too.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import collectives
from collective.replication.assignments import alike
from collective.tables import dense_view
from collective.tables.table import Sharded, shard_view


def assign_moving_average(
    original: Any, variable: Any, value: Any, decay: Any, *args: Any, **kwargs: Any
) -> Any:
    """`moving_averages.assign_moving_average`: of a tensor, towards the mean of the ranks' tensors."""
    return original(variable, alike(variable, value), decay, *args, **kwargs)


def of_layer(original: Any, layer: Any, variable: Any, value: Any, *args: Any) -> Any:
    """`BatchNormalization._assign_moving_average` and `_assign_new_value`."""
    return original(layer, variable, alike(variable, value), *args)


def apply_average(original: Any, average: Any, var_list: Any = None) -> tf.Operation:
    """`ExponentialMovingAverage.apply`: the average of a table is sharded as the table is, and
    looked up as one.
    """
    listed = tf.trainable_variables() if var_list is None else list(var_list)
    tables = [v for v in listed if isinstance(v, Sharded)]
    for table in tables:
        if table.rows is None:
            table.refuse("tf.train.ExponentialMovingAverage")
    if collectives.size() == 1 or not tables:
        return original(average, var_list)
    with tf.control_dependencies([dense_view.agreed(tables[0], average.name)]), shard_view():
        return original(average, listed)
