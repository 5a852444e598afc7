"""Lets Keras's models take steps without a function (`run_eagerly=True`) on all ranks together.

A step is then Python code, whose lookups and gradients are calls of functions, one after the other.
So ranks agree before a step on who has a batch, and none begins what others can't finish:

    every rank has one        all take the step
    training, a rank hasn't   it is over on all
    evaluation, a rank hasn't it takes the step with records that don't count
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import barrier, coordinator
from collective.coordination.functions import calls, first_values, stops
from collective.coordination.prepared_run import Membership
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.replication import cross_replica, eager_states

ENDS = (StopIteration, tf.errors.OutOfRangeError)
# Whether a step is being taken.
_inside: list[bool] = []


def is_inside() -> bool:
    """Tells whether Keras takes a step now: metrics it asks for are of this rank's records."""
    return bool(_inside)


def of_all_ranks(kind: str, model: Any, step: Callable[[Iterator[Any]], Any]) -> Any:
    """Returns a step that all ranks take together, or none.

    Args:
        kind: "train", "test" or "predict".
        model: the model.
        step: Keras's, of this rank; it takes a batch from an iterator.

    The step raises `Preempted` where the ranks stop.
    """
    if collectives.size() == 1:

        def take_alone(iterator: Any) -> Any:
            stops.begin(stops.TRAINING)
            return step(iterator)

        return take_alone
    name = f"a step of the Keras model '{model.name}' ({kind})"
    last: list[Any] = []

    def take(iterator: Any) -> Any:
        stops.begin(stops.TRAINING)
        ends: list[BaseException] = []

        def has_batch() -> bool:
            try:
                last[:] = [next(iterator)]
            except ENDS as end:
                ends.append(end)
            return not ends

        have = barrier.run_on_all_ranks(None, name, has_batch)
        while ends and any(have) and kind != "train":
            _answer(model, step, last[0] if last else _of_no_record(iterator.element_spec))
            stops.begin(stops.TRAINING)
            have = barrier.run_on_all_ranks(None, name, lambda: False)
        if ends:
            raise ends[0]
        if kind == "train" and not all(have):
            raise tf.errors.OutOfRangeError(None, None, "Another rank is out of data.")
        first_values.share(model.weights if model.built else [])
        return _taken(step, last[0])

    return take


def _taken(step: Callable[[Iterator[Any]], Any], batch: Any) -> Any:
    _inside.append(True)
    try:
        with first_values.shared_at_once():  # of a model that is built in this step
            return step(iter([batch]))
    except RankError:
        raise  # of an error of another rank
    except Exception as error:
        # Where it is an error of all ranks, all of them tell each other so.
        failure = f"failed with {type(error).__name__}: {error}"
        ranks = coordinator.instance()
        ranks.failure = ranks.failure or (Membership(calls.NUMBER, []), failure)
        raise
    finally:
        _inside.pop()


def _answer(model: Any, step: Callable[[Iterator[Any]], Any], batch: Any) -> None:
    """Takes a step for the sake of the peers: this rank's metrics stay what they are."""
    states = {id(v): v.numpy() for metric in model.metrics for v in metric.variables}
    with cross_replica.answering():
        _taken(step, batch)
    with eager_states.as_they_are():
        for metric in model.metrics:
            for variable in metric.variables:
                if id(variable) in states:
                    variable.assign(states[id(variable)])
                else:  # made in this step
                    metric.reset_state()


def _of_no_record(spec: Any) -> Any:
    """Returns a batch without records, of a rank that has never had one."""

    def empty(each: Any) -> Any:
        if isinstance(each, tf.RaggedTensorSpec):
            shape = each.flat_values_spec.shape if each.flat_values_spec is not None else [0]
            flat = tf.zeros([0, *shape[1:]], each.dtype)
            splits = [tf.zeros([1], each.row_splits_dtype) for _ in range(each.ragged_rank)]
            return tf.RaggedTensor.from_nested_row_splits(flat, splits)
        if isinstance(each, tf.SparseTensorSpec):
            shape = [n or 0 for n in each.shape]
            indices = tf.zeros([0, len(shape)], tf.int64)
            return tf.SparseTensor(indices, tf.zeros([0], each.dtype), tf.constant(shape, tf.int64))
        return tf.zeros([n or 0 for n in each.shape], each.dtype)

    return tf.nest.map_structure(empty, spec)
