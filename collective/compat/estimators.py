"""Makes TensorFlow's Estimators, where a script makes them in scope(), those of all ranks.

A script that runs as it is says `tf.estimator.Estimator`. The library refuses that in scope(), as
each rank would use all of the input, and has `CollectiveStrategy.estimator` in its place.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.compat.estimator_names import INCREMENTS
from collective.compat.framework import say_once
from collective.scope import SCOPES
from collective.strategy import CollectiveStrategy


def _strategy() -> CollectiveStrategy:
    return CollectiveStrategy()


class Estimator(tf.estimator.Estimator):
    """Is `CollectiveStrategy.estimator` in scope(), and TensorFlow's own outside."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes the one or the other; a subclass is TensorFlow's."""
        if cls is Estimator and SCOPES.is_open:
            made = _strategy().estimator(*args, **kwargs)
            exporting = _taking_increments(made.export_saved_model)
            made.export_saved_model = exporting  # type: ignore[method-assign]
            return made
        return super().__new__(cls)

    def export_saved_model(self, *args: Any, **kwargs: Any) -> Any:
        """Exports a model: TensorFlow's function."""
        return _taking_increments(super().export_saved_model)(*args, **kwargs)


def _taking_increments(export: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that takes the argument INCREMENTS, too."""

    @functools.wraps(export)
    def taking(*args: Any, **kwargs: Any) -> Any:
        if kwargs.pop(INCREMENTS.keyword, False):
            INCREMENTS.use()
        return export(*args, **kwargs)

    return taking


def _ready_made(name: str) -> Any:
    """Returns one of TensorFlow's ready-made Estimators, whose model all ranks train in scope()."""
    original = getattr(tf.estimator, name)

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is not made or not SCOPES.is_open:
            return object.__new__(cls)
        alone = original(*args, **kwargs)
        if kwargs.get("loss_reduction", tf.losses.Reduction.SUM) == tf.losses.Reduction.SUM:
            say_once(
                f"tf.estimator.{name}'s loss is a sum over a batch; an update takes the mean of "
                "the ranks' sums, each of a batch of its own"
            )
        return _strategy().estimator(alone.model_fn, alone.model_dir, alone.config)

    made = type(name, (original,), {"__new__": new, "__doc__": original.__doc__})
    return made


DNNClassifier = _ready_made("DNNClassifier")
DNNLinearCombinedClassifier = _ready_made("DNNLinearCombinedClassifier")
DNNLinearCombinedRegressor = _ready_made("DNNLinearCombinedRegressor")
DNNRegressor = _ready_made("DNNRegressor")
LinearClassifier = _ready_made("LinearClassifier")
LinearRegressor = _ready_made("LinearRegressor")


def train_and_evaluate(estimator: Any, train_spec: Any, eval_spec: Any) -> Any:
    """Calls the method of an Estimator of all ranks, or TensorFlow's function."""
    if hasattr(estimator, "train_and_evaluate"):
        return estimator.train_and_evaluate(train_spec, eval_spec)
    return tf.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
