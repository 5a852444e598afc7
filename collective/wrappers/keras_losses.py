"""Lets the loss that a Keras model is compiled with be that of the records of all ranks.

Ranks may have different numbers of records in a step: in the last batch, or where N doesn't divide
the batch. With b records on a rank, and B on all, a rank's loss counts b/B. In logs it does, as
Keras weighs a batch's loss by its records. An update takes the mean of the ranks' gradients, so
that in them a loss counts N * b/B times. What a rank's loss has to be for that:

    reduction    in the gradient    in the logs
    a mean       itself             itself
    'sum'        B/b times          B/b times
    'none'       B/b times          once: Keras adds up the gradients, and logs the mean

Outside of Keras's steps, and in loops, each rank counts alike: 1/N.
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
from collective.ops.graph import device_scopes
from collective.replication import cross_replica
from collective.tensorflow_internals.keras import package
from collective.wrappers import keras_functions

_SUM, _NONE = (package.losses.Reduction.SUM, package.losses.Reduction.NONE)


class _Batch:
    """Describes a batch of which a compiled model's losses are computed.

    Attributes:
        is_of_step: whether the ranks train or evaluate together: outside of Keras's steps a script
            may compute the loss on one rank alone.
    """

    def __init__(self, of: Any, is_of_step: bool) -> None:
        self._of = of
        self.is_of_step = is_of_step

    @functools.cached_property
    def weight(self) -> Any:
        """Returns N times the share of this rank's records: 1 if ranks have as many."""
        if not self.is_of_step:
            return tf.ones([], tf.float64)
        if not cross_replica.can_join():
            _warn()
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
    batch = _BATCH.get()
    return batch is not None and batch.is_of_step


def compiled_loss(
    original: Callable[..., Any],
    container: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
    regularization_losses: Any = None,
) -> Any:
    """Replaces `LossesContainer.__call__`, the loss of a compiled model."""
    if cross_replica.is_alone():
        return original(container, y_true, y_pred, sample_weight, regularization_losses)
    if not container.built:
        container.build(y_pred)
    of_keras = container._losses
    targets = tf.nest.flatten(container._conform_to_outputs(y_pred, y_true))
    used = [x for x, loss in zip(targets, of_keras) if x is not None and loss is not None]
    outputs = tf.nest.flatten(y_pred)
    trains = keras_functions.is_training()
    batch = _Batch((used or outputs)[0], trains or keras_functions.is_evaluating())
    if trains and not used and regularization_losses:
        # Keras logs them as if each batch were one record.
        regularization_losses = [x * batch.weight_as(x) for x in regularization_losses]
    container._losses = [of_all_ranks(loss) for loss in of_keras]
    try:
        with _losses_of(batch):
            loss = original(container, y_true, y_pred, sample_weight, regularization_losses)
    finally:
        container._losses = of_keras
    if loss is None or not (trains and used):
        return loss
    return loss * batch.weight_as(loss)


def prepare_total_loss(original: Callable[..., Any], model: Any, *args: Any) -> Any:
    """Replaces `_prepare_total_loss` of a model in a graph."""
    if cross_replica.is_alone():
        return original(model, *args)
    endpoints = model._training_endpoints
    of_keras = [(endpoint._loss_fn, endpoint.output_loss_metric) for endpoint in endpoints]
    batch = _Batch(tf.nest.flatten(model.outputs)[0], is_of_step=True)
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


@functools.cache
def _warn() -> None:
    """Warns once in a process."""
    if collectives.rank() == 0:
        tf.logging.warning(
            "The loss with which a Keras model is compiled is computed in a loop, or in a function "
            "that can't become a part of the step. There each rank's loss counts alike, also if "
            "its batch has fewer records than those of other ranks. Compute the loss directly in "
            "train_step."
        )


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
