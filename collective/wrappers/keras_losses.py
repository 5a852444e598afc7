"""Lets a Keras loss that adds up the samples of a batch add up those of all ranks.

An update takes the mean of the ranks' gradients. That is the gradient of the whole batch if the
loss is a mean over samples. For a sum it would be the N-th part, so each sample counts N times.

    reduction    in the gradient    in the logs
    'sum'        N times            N times: the mean over ranks is the sum over all samples
    'none'       N times            once: Keras adds up the gradients, and logs the mean
"""

from __future__ import annotations

import copy
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.tensorflow_internals.keras import package

_SUM, _NONE = (package.losses.Reduction.SUM, package.losses.Reduction.NONE)


def loss_object(original: Callable[..., Any], container: Any, loss: Any) -> Any:
    """Replaces `LossesContainer._get_loss_object`, by which a compiled model gets its losses."""
    return of_all_ranks(original(container, loss))


def prepare_total_loss(original: Callable[..., Any], model: Any, *args: Any) -> Any:
    """Replaces `_prepare_total_loss` of a model in a graph."""
    endpoints = model._training_endpoints
    losses = [endpoint._loss_fn for endpoint in endpoints]
    for endpoint, loss in zip(endpoints, losses):
        endpoint._loss_fn = of_all_ranks(loss)
    try:
        return original(model, *args)
    finally:
        for endpoint, loss in zip(endpoints, losses):
            endpoint._loss_fn = loss


def of_all_ranks(loss: Any) -> Any:
    """Returns a loss whose mean over ranks is `loss` of all samples."""
    ranks = collectives.size()
    reduction = getattr(loss, "reduction", None)
    if ranks == 1 or reduction not in (_SUM, _NONE):
        return loss
    call = loss.call

    @tf.autograph.experimental.do_not_convert
    def of_samples(y_true: Any, y_pred: Any) -> Any:
        values = tf.convert_to_tensor(call(y_true, y_pred))
        extra = values * (ranks - 1)
        return values + (extra if reduction == _SUM else extra - tf.stop_gradient(extra))

    scaled = copy.copy(loss)
    scaled.call = of_samples
    return scaled
