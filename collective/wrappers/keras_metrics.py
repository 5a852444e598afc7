"""Gives the results of metrics of eager Keras that all ranks update together: of all records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination.functions import eager_values
from collective.ops.communication import collectives
from collective.replication import eager_states
from collective.tensorflow_internals.keras import tf_utils
from collective.wrappers import keras_eager_steps


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
    with eager_states.of_all_ranks(f"the metrics of the Keras model '{model.name}'", states):
        return tf_utils.sync_to_numpy_or_python_type(original(model))


def epoch_logs(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Replaces `Model._validate_and_get_metrics_result`: logs are those of all ranks.

    What a `train_step` of the script's own returns besides its metrics is the mean over the ranks.
    A value by the name of a metric may be the metric's result, or something else.
    """
    if collectives.size() == 1 or not tf.executing_eagerly():
        return original(model, logs)
    own = _results(model) if logs else {}
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
    for metric in model.metrics:
        result = metric.result()
        results.update(result if isinstance(result, dict) else {metric.name: result})
    return results


def _is_number(value: Any) -> bool:
    try:
        return tf.constant(value).shape.rank == 0 and tf.constant(value).dtype.is_floating
    except (TypeError, ValueError):
        return False
