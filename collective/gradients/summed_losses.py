"""Warns of a loss with a number for each sample, whose gradient is that of their sum.

On several ranks gradients are means over ranks. For a loss that is a mean over a rank's samples
this is the gradient of the whole batch's loss; for a sum it is 1/N of it.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.gradients.reduction import is_variable
from collective.ops.communication import collectives
from collective.ops.graph import graphs
from collective.replication.pending_syncs import analysis_of

# The shapes of eager targets of which a rank has warned.
_said: set[tuple[int, ...]] = set()


def warn(target: Any, sources: Any, weights: Any = None) -> None:
    """Warns if a gradient with respect to variables is taken of numbers of single samples.

    Args:
        target: what is differentiated, tensors in any structure.
        sources: with respect to what.
        weights: what the gradients of `target` are multiplied by (`grad_ys`): they say how its
            numbers are added up.
    """
    if collectives.size() == 1 or collectives.rank() or weights is not None:
        return
    if not any(is_variable(x) for x in tf.nest.flatten(sources)):
        return
    for loss in tf.nest.flatten(target):
        if isinstance(loss, tf.Tensor) and _is_new(loss) and _may_be_per_sample(loss):
            _warn_of(loss)


def _is_new(loss: tf.Tensor) -> bool:
    if not tf.is_symbolic_tensor(loss):
        return tuple(loss.shape.as_list()) not in _said
    return not hasattr(loss.op, "_collective_warned")


def _may_be_per_sample(loss: tf.Tensor) -> bool:
    if loss.shape.rank == 0 or loss.shape.num_elements() == 1:
        return False
    if not tf.is_symbolic_tensor(loss):
        return True
    if graphs.outermost(loss.graph) is not loss.graph:
        return False
    return loss.shape.rank is None or analysis_of(loss.graph).is_per_sample([loss])


def _warn_of(loss: tf.Tensor) -> None:
    name = "A loss"
    if tf.is_symbolic_tensor(loss):
        loss.op._collective_warned = True
        name = f"The loss '{loss.op.name}'"
    else:
        _said.add(tuple(loss.shape.as_list()))
    shape = "no static shape" if loss.shape.rank is None else f"the shape {loss.shape}"
    tf.logging.warning(
        f"{name} has {shape}. If it has a number for each sample, TensorFlow takes the gradient of "
        "their sum. On several ranks that is the mean of the ranks' sums, and a step "
        f"1/{collectives.size()} of that of the whole batch. Minimize its mean: "
        "tf.reduce_mean(loss)."
    )
