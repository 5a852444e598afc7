"""Makes the functions by which Keras's models train and evaluate eagerly functions of all ranks."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.wrappers import keras_eager_steps

# What Keras does now: "train", "test" or "predict".
_KIND = contextvars.ContextVar("what Keras does", default="")


def make(kind: str, original: Callable[..., Any], model: Any, force: bool = False) -> Any:
    """Replaces `Model.make_train_function`, `make_test_function` and `make_predict_function`.

    A function that was made outside scope() has the gradients of a single rank: it is made again.
    Ranks agree on each call, so with `steps_per_execution` it is called for each step.

    Args:
        kind: "train", "test" or "predict".
        original: Keras's.
        model: the model.
        force: whether the script wants it to be made again.

    Raises:
        NotImplementedError: it is compiled with an option that isn't possible here.
    """
    _check_options(model)
    # Keras would track what becomes an attribute in the usual way.
    attributes = vars(model)
    made = attributes.setdefault("_collective_functions", set())
    steps, attributes["_steps_per_execution"] = model._steps_per_execution, None
    try:
        if force or kind not in made or getattr(model, f"{kind}_function") is None:
            one = original(model, True)
            if model.run_eagerly and tf.executing_eagerly():
                one = keras_eager_steps.of_all_ranks(kind, model, one)
            one = functools.partial(_noted, kind, one)
            several = functools.partial(_each_step, kind, one, steps)
            made.add(kind)
            setattr(model, f"{kind}_function", one if steps is None else several)
    finally:
        attributes["_steps_per_execution"] = steps
    return getattr(model, f"{kind}_function")


def is_evaluating() -> bool:
    """Tells whether Keras evaluates a model, as all ranks do together."""
    return _KIND.get() == "test"


def is_training() -> bool:
    """Tells whether Keras trains a model, as all ranks do together."""
    return _KIND.get() == "train"


def _noted(kind: str, step: Callable[[Any], Any], iterator: Any) -> Any:
    token = _KIND.set(kind)
    try:
        return step(iterator)
    finally:
        _KIND.reset(token)


def _check_options(model: Any) -> None:
    if getattr(model, "autotune_steps_per_execution", False):
        raise NotImplementedError(
            f"The Keras model '{model.name}' is compiled with steps_per_execution='auto', by which "
            "ranks would choose different numbers. Give a number."
        )
    if getattr(model, "jit_compile", False):
        raise NotImplementedError(
            f"The Keras model '{model.name}' is compiled with jit_compile=True, and XLA compiles "
            "no exchange between ranks. Leave it out of model.compile."
        )


def _each_step(kind: str, one: Callable[[Any], Any], steps: Any, iterator: Any) -> Any:
    """Calls a function of one step as often as Keras wants, and returns what Keras does."""
    outputs = [one(iterator) for _ in range(int(steps.numpy()))]
    if kind != "predict" or len(outputs) == 1:
        return outputs[-1]
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
