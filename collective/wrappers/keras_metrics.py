"""Gives the results of metrics of eager Keras that all ranks update together: of all records."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination.functions import eager_values
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.replication import eager_states
from collective.tensorflow_internals.keras import tf_utils
from collective.wrappers import keras_eager_steps, keras_fit

# Not empty where `Metric.result()` is of this rank's records.
_own: list[bool] = []


def keep_own_results() -> None:
    """Lets `Metric.result()` be of each rank's own records, as scripts of Horovod have it."""
    _own.append(True)


def result_wrapper(original: Callable[..., Any], result: Callable[..., Any]) -> Any:
    """Replaces Keras's `result_wrapper`, which each metric has around its `result`.

    Without a function, the result of a metric that ranks update together is of all ranks' records.
    Every rank asks for it.
    """
    of_states = original(result)

    def of_all_ranks(metric: Any, *args: Any) -> Any:
        with _of_all_ranks(metric):
            return of_states(metric, *args)

    return functools.wraps(of_states)(of_all_ranks)


@contextlib.contextmanager
def _of_all_ranks(metric: Any) -> Iterator[None]:
    """Inside, a metric's result is computed of all ranks' states, if ranks update it together."""
    is_own = bool(_own) or not tf.executing_eagerly() or keras_eager_steps.is_inside()
    states = [] if is_own else eager_states.to_combine(metric.variables)
    with contextlib.ExitStack() as combined:
        if states:
            whose = f"The metric '{metric.name}'"
            name = f"calls result() of the Keras metric '{metric.name}', as all ranks must"
            every = eager_states.of_all_ranks(name, [(whose, v) for v in states])
            try:
                combined.enter_context(every)
            except tf.errors.OpError as error:
                raise RankError(f"A rank {name}, and another one has ended.") from error
        yield


def metrics_result(original: Callable[..., Any], model: Any) -> Any:
    """Replaces `Model.get_metrics_result`: outside of functions, metrics are those of all ranks.

    Every rank calls it. The states of all metrics are combined; each rank keeps its own.

    Raises:
        NotImplementedError: a metric has a state that can't be combined.
    """
    if collectives.size() == 1 or not tf.executing_eagerly() or keras_eager_steps.is_inside():
        return original(model)
    states = [
        (f"The metric '{metric.name}'", v) for metric in model.metrics for v in metric.variables
    ]
    name = f"the metrics of the Keras model '{model.name}'"
    with eager_states.of_all_ranks(name, states):
        return tf_utils.sync_to_numpy_or_python_type(original(model))


def epoch_logs(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Replaces `Model._validate_and_get_metrics_result`: logs are those of all ranks.

    What a `train_step` of the script's own returns besides its metrics is the mean over the ranks.
    A value by the name of a metric may be the metric's result, or something else.
    """
    if collectives.size() == 1 or not tf.executing_eagerly():
        return original(model, logs)
    own = _results(model) if logs else {}
    with keras_fit.stopping(model):
        metrics = model.get_metrics_result()
    if not logs or set(logs) == set(metrics):
        return metrics
    names = sorted(name for name, value in logs.items() if _is_number(value))
    name = f"logs of the Keras model '{model.name}'"
    values = [tf.constant(logs[n], tf.float32).numpy() for n in names]
    are_results = [_is_number(own.get(n)) and np.isclose(own[n], logs[n], 1e-5) for n in names]
    sums = eager_values.sums(name, [*values, *(np.array(is_one, "f") for is_one in are_results)])
    size = collectives.size()
    for n, total, results in zip(names, sums, sums[len(names) :]):
        if results < size:
            metrics[n] = float(total) / size
    return {n: metrics.get(n, value) for n, value in logs.items()}


def _results(model: Any) -> dict[str, Any]:
    """Returns the results of a model's metrics on this rank."""
    results: dict[str, Any] = {}
    _own.append(True)
    try:
        for metric in model.metrics:
            result = metric.result()
            results.update(result if isinstance(result, dict) else {metric.name: result})
    finally:
        _own.pop()
    return results


def _is_number(value: Any) -> bool:
    try:
        return tf.constant(value).shape.rank == 0 and tf.constant(value).dtype.is_floating
    except (TypeError, ValueError):
        return False
