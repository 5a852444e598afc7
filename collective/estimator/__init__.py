"""Lets `tf.estimator.Estimator` work on all ranks, and has its API next to every TensorFlow.

TensorFlow has no `tf.estimator` from 2.16 on; importing `CollectiveStrategy` gives it one, so that
scripts run as they are. `collective.estimator` has its names by themselves, such as
`EstimatorSpec`, `ModeKeys`, `TrainSpec`, `EvalSpec`, `Exporter`s and `export`. They are those of
the package tensorflow-estimator 2.15 (up to TensorFlow 2.15 `tf.estimator`'s own), but `RunConfig`
is `collective.RunConfig`. `CollectiveStrategy.estimator` makes an Estimator:

    from collective import estimator as estimators

    def model_fn(features, labels, mode):
        ...
        return estimators.EstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = strategy.estimator(model_fn, 'model', estimators.RunConfig(tf_random_seed=1))

Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/compat/v1/estimator
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "RunConfig":
        return importlib.import_module(f"{__name__}.run_config").RunConfig
    api = importlib.import_module("collective.tensorflow_internals.estimators").api
    try:
        return getattr(api, name)
    except AttributeError:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}, and tf.estimator of TensorFlow 2.15 "
            "has none either"
        ) from None


def __dir__() -> list[str]:
    api = importlib.import_module("collective.tensorflow_internals.estimators").api
    return sorted({*globals(), *dir(api)})
