"""Refuses TensorFlow's own Estimator if it would use all of the input on every rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.graph import graph_state


@dataclasses.dataclass
class Builder:
    """Records whether the model_fn of an estimator of this library builds a graph."""

    is_collective_estimator: bool = False


def call_model_fn(original: Any, estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `Estimator._call_model_fn`, which each method of an estimator calls.

    Raises:
        TypeError: the estimator wasn't made by `strategy.estimator`, and there are several ranks.
    """
    is_collective = (
        hasattr(type(estimator), "served_checkpoint")
        or graph_state.of(tf.get_default_graph(), Builder).is_collective_estimator
    )
    if collectives.size() > 1 and not is_collective:
        raise TypeError(
            f"{type(estimator).__name__} is TensorFlow's own Estimator: each of the "
            f"{collectives.size()} ranks would use all of the input. Make it with "
            "strategy.estimator(model_fn, model_dir, …); of an estimator that you have, with "
            "strategy.estimator(estimator.model_fn, model_dir, …). (What tf.estimator.add_metrics "
            "returns is one, too: put the metrics into model_fn.)"
        )
    return original(estimator, *args, **kwargs)
