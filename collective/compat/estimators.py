"""Makes the Estimators that a script makes in scope() Estimators of all ranks.

An unchanged script says `tf.estimator.Estimator`. The library refuses that in scope(), since each
rank would use all of the input, and offers `CollectiveStrategy.estimator` instead.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.framework import say_once
from collective.compat.names.estimator import DNN_DTYPE, INCREMENTS
from collective.estimator import estimator as collective_estimator
from collective.scope import SCOPES
from collective.strategy import CollectiveStrategy
from collective.tensorflow_internals.estimators import api
from collective.tensorflow_internals.estimators import estimator as estimator_lib


class Estimator(api.Estimator):
    """`CollectiveStrategy.estimator` in scope(), and TensorFlow's own Estimator outside.

    The same holds for an object of a script's own subclass.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes one or the other."""
        made: Any = _of_all_ranks(cls) if SCOPES.is_open else cls
        return super().__new__(made)

    def __init__(self, *args: Any, **kwargs: Any):
        if isinstance(self, collective_estimator.Estimator):
            self.__dict__.update(vars(CollectiveStrategy().estimator(*args, **kwargs)))
        else:
            super().__init__(*args, **kwargs)

    def _assert_members_are_not_overridden(self) -> None:
        """Checks a script's own subclass as TensorFlow does."""
        estimator_lib._assert_members_are_not_overridden(Estimator, self)

    def export_saved_model(self, *args: Any, **kwargs: Any) -> Any:
        """Exports a model by the method of either class, which also takes INCREMENTS."""
        if kwargs.pop(INCREMENTS.keyword, False):
            INCREMENTS.use()
        return super().export_saved_model(*args, **kwargs)


def _of_all_ranks(cls: Any) -> Any:
    """Returns a subclass of a script's Estimator with the methods of an Estimator of all ranks."""
    members = {"__doc__": cls.__doc__, "__module__": cls.__module__}
    return type(cls.__name__, (cls, collective_estimator.Estimator), members)


def _ready_made(name: str) -> Any:
    """Returns a ready-made Estimator of TensorFlow that all ranks train together in scope()."""
    original = getattr(api, name)

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if DNN_DTYPE.keyword in kwargs and name in DNN_DTYPE.theirs:
            DNN_DTYPE.use()
        if cls is not made or not SCOPES.is_open:
            return object.__new__(cls)
        alone = original(*args, **kwargs)
        if kwargs.get("loss_reduction", tf.losses.Reduction.SUM) == tf.losses.Reduction.SUM:
            say_once(
                f"tf.estimator.{name}'s loss is a sum over a batch; an update takes the mean of "
                "the ranks' sums, each of a batch of its own"
            )
        return CollectiveStrategy().estimator(alone.model_fn, alone.model_dir, alone.config)

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
    own = getattr(type(estimator), "train_and_evaluate", None)
    if own is not None:
        return own(estimator, train_spec, eval_spec)
    return api.train_and_evaluate(estimator, train_spec, eval_spec)
