"""Refuses what `tf.distribute` has for several replicas: scope() distributes the training.

Both would make replicas of variables, and add up gradients. To TensorFlow a rank has one replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v2 as tf2

from collective.ops.communication import collectives


def scope(original: Callable[..., Any], strategy: Any) -> Any:
    """Replaces `tf.distribute.Strategy.scope`.

    Raises:
        NotImplementedError: it is any other strategy than the default one, which Keras opens, too.
    """
    if not tf2.distribute.has_strategy() and strategy is not tf2.distribute.get_strategy():
        _refuse(strategy)
    return original(strategy)


def refuse_open() -> None:
    """Refuses a strategy of `tf.distribute` in whose scope the caller is.

    Raises:
        NotImplementedError: there is one.
    """
    if tf2.distribute.has_strategy():
        _refuse(tf2.distribute.get_strategy())


def compute_average_loss(
    original: Callable[..., Any],
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> Any:
    """Replaces `tf.nn.compute_average_loss`, by which a loop of `tf.distribute` has its loss.

    There gradients are added up over replicas, and here an update takes their mean.

    Raises:
        NotImplementedError: it would divide by the batch of all ranks, and there are several.
    """
    if global_batch_size is not None and collectives.size() > 1:
        raise NotImplementedError(
            "tf.nn.compute_average_loss(…, global_batch_size=…) would divide the loss of a rank "
            "by the samples of all ranks, and gradients are means over ranks: training would be "
            f"{collectives.size()} times too slow. Leave global_batch_size out; each rank then "
            "divides by the number of its own samples."
        )
    return original(per_example_loss, sample_weight, global_batch_size)


def _refuse(strategy: Any) -> None:
    raise NotImplementedError(
        f"tf.distribute's {type(strategy).__name__} can't be used together with "
        "CollectiveStrategy().scope(), which distributes the training itself: leave it out. "
        "`collective launch` starts a process for each GPU, or with -np 2 two of them."
    )
