"""Lets the loss that a Keras model is compiled with be that of the records of all ranks.

Ranks may have different numbers of records in a step: in the last batch, or where N doesn't divide
the batch. With b records on a rank, and B on all, a rank's loss counts b/B. In logs it does, as
Keras weighs a batch's loss by its records. An update takes the mean of the ranks' gradients, so
that in them a loss counts N * b/B times. What a rank's loss has to be for that:

    reduction    in the gradient    in the logs
    a mean       itself             itself
    'sum'        B/b times          B/b times
    'none'       B/b times          once: Keras adds up the gradients, and logs the mean

Outside of a compiled model, and where ranks can't exchange numbers, each rank counts alike: 1/N.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.graph import device_scopes, graphs
from collective.replication import cross_replica
from collective.tensorflow_internals.keras import package
from collective.wrappers import joint_losses

_SUM, _NONE = (package.losses.Reduction.SUM, package.losses.Reduction.NONE)


class _Batch:
    """A batch of which a compiled model's losses are computed."""

    def __init__(self, of: Any) -> None:
        self._of = of

    @functools.cached_property
    def weight(self) -> Any:
        """N times the share of this rank's records: 1 if ranks have as many."""
        if joint_losses.is_own() or not cross_replica.can_join(inlining=False):
            return tf.ones([], tf.float64)
        x = self._of
        with device_scopes.on_host():
            if isinstance(x, tf.RaggedTensor):
                return cross_replica.weight_of(x.nrows(tf.int64))
            return cross_replica.weight_of(tf.shape(x, out_type=tf.int64)[0])

    def weight_as(self, like: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.weight, like.dtype)


_BATCH: contextvars.ContextVar[_Batch | None] = contextvars.ContextVar("batch", default=None)


@contextlib.contextmanager
def _losses_of(batch: _Batch | None) -> Iterator[None]:
    token = _BATCH.set(batch)
    try:
        yield
    finally:
        _BATCH.reset(token)


def are_weighed() -> bool:
    """Tells whether a loss that is computed now will count by its rank's records."""
    return _BATCH.get() is not None


def compiled_loss(
    original: Callable[..., Any], container: Any, y_true: Any, y_pred: Any, *args: Any, **kw: Any
) -> Any:
    """Replaces `LossesContainer.__call__`, the loss of a compiled model."""
    targets = [x for x in tf.nest.flatten(y_true) if x is not None]
    if cross_replica.is_alone() or not targets:
        return original(container, y_true, y_pred, *args, **kw)
    batch = _Batch(targets[0])
    with _losses_of(batch):
        loss = original(container, y_true, y_pred, *args, **kw)
    if loss is None or not graphs.is_recorded():
        return loss
    return loss * batch.weight_as(loss)


def loss_object(original: Callable[..., Any], container: Any, loss: Any) -> Any:
    """Replaces `LossesContainer._get_loss_object`, by which a compiled model gets its losses."""
    return of_all_ranks(original(container, loss))


def prepare_total_loss(original: Callable[..., Any], model: Any, *args: Any) -> Any:
    """Replaces `_prepare_total_loss` of a model in a graph."""
    if cross_replica.is_alone():
        return original(model, *args)
    endpoints = model._training_endpoints
    of_keras = [(endpoint._loss_fn, endpoint.output_loss_metric) for endpoint in endpoints]
    batch = _Batch(tf.nest.flatten(model.outputs)[0])
    for endpoint, (loss, metric) in zip(endpoints, of_keras):
        endpoint._loss_fn = of_all_ranks(loss)
        if metric is not None:
            endpoint.output_loss_metric = functools.partial(_add_weighed, metric, batch)
    try:
        with _losses_of(batch):
            total = original(model, *args)
    finally:
        for endpoint, (loss, metric) in zip(endpoints, of_keras):
            endpoint._loss_fn, endpoint.output_loss_metric = loss, metric
    if not isinstance(total, tf.Tensor):
        return total

    @tf.custom_gradient
    def weighed(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda gradient: gradient * batch.weight_as(x)

    return weighed(total)


def _add_weighed(metric: Any, batch: _Batch, loss: Any) -> Any:
    """Adds an output's loss to its metric, which in a graph is a mean over batches."""
    return metric(loss * batch.weight_as(loss))


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
        batch = _BATCH.get()
        times: Any = ranks
        if batch is not None:
            times = tf.cast(tf.div_no_nan(float(ranks), batch.weight), values.dtype)
        extra = values * (times - 1)
        return values + (extra if reduction == _SUM else extra - tf.stop_gradient(extra))

    scaled = copy.copy(loss)
    scaled.call = of_samples
    return scaled
