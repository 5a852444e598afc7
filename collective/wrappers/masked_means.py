"""Warns of losses that are means over what counts of a rank's own batch.

A loss with a mask, or with weights of which some are 0, is divided by the number of positions that
count. Each rank divides by its own number, and an update takes the mean of the ranks' gradients. So
a position of a rank that has few of them counts more than in one process.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.tensorflow_internals.keras import package

_MEANS = (
    package.losses.Reduction.AUTO,
    package.losses.Reduction.SUM_OVER_BATCH_SIZE,
    tf.losses.Reduction.MEAN,
    tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
)


def apply_valid_mask(
    original: Callable[..., Any], losses: Any, weights: Any, mask: Any, reduction: Any
) -> Any:
    """Replaces `losses_utils.apply_valid_mask`, by which a Keras loss leaves out what is masked."""
    if mask is not None and reduction in _MEANS:
        _warn(
            "A Keras loss is the mean over the positions that the mask of a model's output leaves "
            "(mask_zero=True).",
            "Leave the mask out before the last layer, or make the loss with reduction='sum', "
            "which adds up the positions of all ranks.",
        )
    return original(losses, weights, mask, reduction)


def compute_weighted_loss(
    original: Callable[..., Any],
    losses: Any,
    weights: Any = 1.0,
    scope: Any = None,
    loss_collection: Any = tf.GraphKeys.LOSSES,
    reduction: Any = tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Replaces `tf.losses.compute_weighted_loss`, in which all of `tf.losses` end."""
    is_known = not isinstance(weights, tf.Tensor) or tf.get_static_value(weights) is not None
    if reduction in _MEANS and not is_known:
        _warn(
            "A loss of tf.losses with weights is divided by the number of those that aren't 0, or "
            "by their sum.",
            "If some are 0, use reduction=tf.losses.Reduction.SUM_OVER_BATCH_SIZE, or divide the "
            "sum by horovod.tensorflow.allreduce(x), the mean of the ranks' numbers.",
        )
    return original(losses, weights, scope, loss_collection, reduction)


@functools.cache
def _warn(what: str, advice: str) -> None:
    """Warns once in a process."""
    if collectives.size() > 1 and collectives.rank() == 0:
        tf.logging.warning(
            f"{what} Each rank divides by its own number, so that positions of ranks with few of "
            f"them count more than in one process. {advice}"
        )
