"""Divides losses that are means over what counts of a batch by what counts of all ranks' batches.

A loss with a mask, or with weights of which some are 0, is divided by the number of positions that
count. Divided by its own number, a position of a rank that has few of them would count more than in
one process. So ranks add up their numbers:

    where a tape records          an update takes the mean of the ranks' gradients, so each divides
                                  by the mean of the ranks' numbers
    elsewhere, in a compiled      a rank's loss counts by its records, so its sum is divided by its
    model                         share of the number, as large as its share of the records
    `tf.losses` in a graph        the gradient is that of the mean of all ranks; a session fetches
                                  the loss of this rank's batch, also on one rank alone

Where ranks can't count together, as in a loop, each divides by its own number, and is warned. A
loss of a function without tables and gradients is this rank's own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.graph import graphs
from collective.replication import cross_replica
from collective.tables import traced_lookups
from collective.tensorflow_internals.graphs import record
from collective.tensorflow_internals.keras import losses_utils, package
from collective.wrappers import keras_eager_steps, keras_functions, keras_losses

_MEANS = (
    package.losses.Reduction.AUTO,
    package.losses.Reduction.SUM_OVER_BATCH_SIZE,
    tf.losses.Reduction.MEAN,
    tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
)
_OF_MASK = "A Keras loss is the mean over the positions that the mask of a model's output leaves"
_OF_WEIGHTS = "A loss of tf.losses is the mean over the positions whose weights aren't 0"
_GRADIENT = "CollectiveMeanOverAllRanks"
# Whether the mean that `tf.losses` computes now is over what counts.
_COUNTS = contextvars.ContextVar("mean over what counts", default=False)


def apply_valid_mask(
    original: Callable[..., Any], losses: Any, weights: Any, mask: Any, reduction: Any
) -> Any:
    """Replaces `losses_utils.apply_valid_mask`, by which a Keras loss leaves out what is masked.

    Keras multiplies the mask by the ratio of all positions to those it leaves.
    """
    if mask is None or reduction not in _MEANS or not _joins(_OF_MASK):
        return original(losses, weights, mask, reduction)
    mask = tf.cast(mask, tf.float32)
    number = _share("mask", tf.reduce_sum(mask), tf.shape(mask)[0])
    ratio = tf.cast(tf.size(mask), tf.float32) / number
    return losses_utils.apply_mask(losses, weights, tf.cast(mask * ratio, losses.dtype))


def compute_weighted_loss(
    original: Callable[..., Any],
    losses: Any,
    weights: Any = 1.0,
    scope: Any = None,
    loss_collection: Any = tf.GraphKeys.LOSSES,
    reduction: Any = tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Replaces `tf.losses.compute_weighted_loss`, in which all of `tf.losses` end."""
    with contextlib.ExitStack() as inside:
        if reduction in _MEANS and not _is_one_number(weights):
            inside.callback(_COUNTS.reset, _COUNTS.set(True))
        return original(losses, weights, scope, loss_collection, reduction)


def safe_mean(original: Callable[..., Any], losses: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Replaces `_safe_mean` of `tf.losses`: the sum of `losses`, divided by `number`, or 0."""
    if not _COUNTS.get() or not _joins(_OF_WEIGHTS):
        return original(losses, number)
    graph = tf.get_default_graph()
    if tf.executing_eagerly() or graphs.is_traced(graphs.outermost(graph)):
        return original(losses, _share("weights", number, tf.constant(1)))
    if graphs.is_function(graph):  # The gradient of a branch is made in a function, too.
        _warn(_OF_WEIGHTS)
        return original(losses, number)
    # It adds no operation: TensorFlow numbers by them the random ones that have no seed.
    with graph.gradient_override_map({"DivNoNan": _GRADIENT}), record.stop_recording():
        mean = original(losses, number)
    # A tape wouldn't find the gradient by its name.
    record.record_operation(
        _GRADIENT, [mean], [losses, number], functools.partial(_taped_gradient, mean.op, losses)
    )
    return mean


@tf.RegisterGradient(_GRADIENT)
def _mean_gradient(op: tf.Operation, gradient: tf.Tensor) -> list[tf.Tensor]:
    """Returns the gradients of the ranks' sum, divided by the sum of their numbers, and times N."""
    name = "gradient_of_tf.losses"
    total, number = cross_replica.sums(name, list(op.inputs))
    of_sum = gradient * tf.div_no_nan(float(collectives.size()), number)
    return [of_sum, -of_sum * tf.div_no_nan(total, number)]


def _taped_gradient(op: tf.Operation, losses: tf.Tensor, gradient: tf.Tensor) -> list[tf.Tensor]:
    of_sum, of_number = _mean_gradient(op, gradient)
    return [tf.broadcast_to(of_sum, tf.shape(losses)), of_number]


def _share(of: str, own: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
    """Returns by what this rank divides, of all ranks' number of positions that count.

    Args:
        of: says what counts.
        own: this rank's number of them.
        records: how many records this rank's batch has.
    """
    own_records = tf.cast(records, own.dtype)
    total, all_records = cross_replica.sums(f"{of}_of_a_loss", [own, own_records])
    if graphs.is_recorded() and not keras_losses.are_weighed():
        return total / collectives.size()
    return total * tf.div_no_nan(own_records, all_records)


def _is_one_number(weights: Any) -> bool:
    """Tells whether weights are one number that is known, the same for all positions."""
    value = tf.get_static_value(weights) if isinstance(weights, tf.Tensor) else weights
    return value is not None and getattr(value, "ndim", 0) == 0 and not isinstance(value, list)


def _joins(what: str) -> bool:
    """Tells whether ranks count together; warns if they should, and can't."""
    if _is_own():
        return False
    can_join = cross_replica.can_join()
    if not can_join:
        _warn(what)
    return can_join


def _is_own() -> bool:
    """Tells whether the loss may be one that this rank computes alone."""
    if cross_replica.is_alone():
        return True
    if tf.executing_eagerly():
        return not (keras_eager_steps.is_inside() or graphs.is_recorded())
    outermost = graphs.outermost(tf.get_default_graph())
    needs_all = graphs.is_recorded() or keras_functions.is_evaluating()
    has_tables = bool(traced_lookups.lookups_in(outermost))
    return graphs.is_traced(outermost) and not needs_all and not has_tables


@functools.cache
def _warn(what: str) -> None:
    """Warns once in a process."""
    if collectives.rank() == 0:
        tf.logging.warning(
            f"{what}, and is computed in a loop, or in a function that ranks don't call together "
            "(of a dataset, or traced outside of scope()). Each rank divides by its own number, so "
            "that positions of ranks with few of them count more than in one process. Compute the "
            "loss directly in the training step."
        )
