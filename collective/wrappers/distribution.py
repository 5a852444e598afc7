"""Has ranks be the replicas of `tf.distribute` where a script asks for them inside scope().

Its strategies are refused: they would make replicas of variables and add up gradients, as scope()
does. But `tf.distribute.get_replica_context()` knows the rank, its `all_gather` has the tensors of
all ranks, and its `all_reduce` their mean.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.ops.communication import collectives
from collective.replication import cross_replica

# Whether an optimizer of Keras's adds up gradients over replicas, of which a rank is the only one.
_OF_OPTIMIZER: contextvars.ContextVar[bool] = contextvars.ContextVar("_OF_OPTIMIZER", default=False)


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


def aggregate_gradients(
    original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces what Keras's optimizers add up gradients over replicas by: scope() has done so."""
    token = _OF_OPTIMIZER.set(True)
    try:
        return original(optimizer, *args, **kwargs)
    finally:
        _OF_OPTIMIZER.reset(token)


def all_reduce(
    original: Callable[..., Any],
    context: Any,
    reduce_op: Any,
    value: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `tf.distribute.ReplicaContext.all_reduce`: the mean of the ranks' tensors.

    Raises:
        NotImplementedError: there are several ranks, and it is a sum, or of `IndexedSlices`.
        ValueError: integers have no mean of their type.
    """
    if _OF_OPTIMIZER.get() or cross_replica.is_alone():
        return original(context, reduce_op, value, *args, **kwargs)
    what = "tf.distribute.get_replica_context().all_reduce"
    if getattr(reduce_op, "value", str(reduce_op)).upper() != "MEAN":
        # Of gradients, which scope() averages, or of a loss that is a mean, it would be N times
        # what a single replica has; of sums of samples it would be right.
        raise NotImplementedError(
            f"{what} would add up what the ranks have, and nobody can tell whether that is meant: "
            "inside scope() gradients are means over ranks without it, and losses "
            "are means, too. Leave it out for gradients, take tf.distribute.ReduceOp.MEAN for "
            "means, or horovod.tensorflow.allreduce(x, op=horovod.tensorflow.Sum) for sums."
        )
    flat = tf.nest.flatten(value)
    if any(isinstance(x, tf.IndexedSlices) for x in flat):
        raise NotImplementedError(
            f"{what} of tf.IndexedSlices is not supported: inside scope() gradients are means over "
            "ranks without it. Leave it out."
        )
    tensors = [tf.convert_to_tensor(x) for x in flat]
    for x in tensors:
        if not x.dtype.is_floating:
            raise ValueError(f"{what}: the mean of {x.dtype.name} is no {x.dtype.name}: cast it.")
    by_type: dict[tf.DType, list[int]] = {}
    for place, x in enumerate(tensors):
        by_type.setdefault(x.dtype, []).append(place)
    for places in by_type.values():
        own = [tensors[place] for place in places]
        totals = cross_replica.sums("all_reduce", own, of_samples=False)
        for place, total in zip(places, totals):
            tensors[place] = total / tf.cast(collectives.size(), total.dtype)
    return tf.nest.pack_sequence_as(value, tensors)


def all_gather(
    original: Callable[..., Any],
    context: Any,
    value: Any,
    axis: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `tf.distribute.ReplicaContext.all_gather`: the tensors of all ranks, joined.

    Raises:
        ValueError: `axis` isn't a number that is known beforehand, or a tensor has no such axis.
        NotImplementedError: it is of `IndexedSlices`.
    """
    if cross_replica.is_alone():
        return original(context, value, axis, *args, **kwargs)

    def joined(x: Any) -> tf.Tensor:
        if isinstance(x, tf.IndexedSlices):
            raise NotImplementedError("all_gather does not support IndexedSlices")
        x, at = tf.convert_to_tensor(x), tf.get_static_value(tf.convert_to_tensor(axis))
        if at is None or x.shape.rank is None or not -x.shape.rank <= at < x.shape.rank:
            raise ValueError(
                f"tf.distribute.get_replica_context().all_gather(…, axis={axis!r}) of a tensor of "
                f"shape {x.shape}: give an axis that it has."
            )
        order = list(range(x.shape.rank))
        order.insert(0, order.pop(at))
        back = [order.index(i) for i in range(len(order))]
        first = tf.transpose(x, order) if at % len(order) else x
        every = cross_replica.concatenated("all_gather", first)
        return tf.transpose(every, back) if at % len(order) else every

    return tf.nest.map_structure(joined, value)


def replica_id(context: Any) -> int:
    """Replaces `tf.distribute.ReplicaContext.replica_id_in_sync_group`: returns the rank."""
    del context
    return collectives.rank()


def skip_summary(original: Callable[..., Any]) -> bool:
    """Replaces what leaves summaries out on all replicas but the first: ranks build equal graphs.

    Rank 0 alone writes them anyway.
    """
    del original
    return False


def _refuse(strategy: Any) -> None:
    raise NotImplementedError(
        f"tf.distribute's {type(strategy).__name__} can't be used together with "
        "CollectiveStrategy().scope(), which distributes the training itself: leave it out. "
        "`collective launch` starts a process for each GPU, or with -np 2 two of them."
    )
