"""Lets `fit`, `evaluate` and `predict` of eager Keras models go the same way on all ranks.

Keras calls a `tf.function` for each batch, and ranks agree on each call
(`collective.coordination.functions.calls`). Training ends when the first rank runs out of data; in
an evaluation a rank without data answers the others. So a rank must not stop by itself because it
knows how many batches it has: where the numbers differ, no rank knows it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.functions import dealing, stops
from collective.data import same_records
from collective.errors import Preempted
from collective.ops.communication import collectives
from collective.wrappers import keras_fit, keras_settings
from collective.wrappers.keras_fit import DATASETS


def fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Model.fit`: all ranks make the same steps, and stop together.

    An epoch has as many batches as the rank with the fewest has. The progress bar is rank 0's.

    If the ranks stop, callbacks that have a method `on_preempted` save by it.

    Raises:
        ValueError: another rank has other epochs; or batches that come to an end unexpectedly.
        RankError: another rank does something else.
        Preempted: the ranks stop.
    """
    if not tf.executing_eagerly():
        return original(model, *args, **kwargs)
    call = keras_fit.bound(original, model, args, kwargs)
    if collectives.size() > 1:
        _of_all_ranks(model, call.arguments)
    keras_fit.note_data(model, call.arguments)
    stops.begin_again()
    try:
        return original(*call.args, **call.kwargs)
    except Preempted:
        for callback in keras_fit.callbacks_in(call.arguments["callbacks"]):
            getattr(callback, "on_preempted", lambda: None)()
        raise
    finally:
        vars(model).pop("_collective_data", None)  # It may be large.


def _of_all_ranks(model: Any, given: dict[str, Any]) -> None:
    """Lets ranks agree on the arguments of their `fit`, and changes what has to be the same."""
    name = f"fit of the Keras model '{model.name}'"
    start = f"the start of {name}"
    said = keras_fit.agreed(
        start,
        lambda: {**keras_fit.described(given), "settings": keras_settings.of_model(model)},
        ["epochs"],
        may_be_unknown=True,
    )
    settings = [each["settings"] for each in said]
    keras_settings.compare(start, settings, "Compile the same model on all ranks.")
    dealing.begin_again()
    dealing.compare()
    if keras_fit.are_all_same(said) and collectives.rank() == 0:
        same_records.warn(f"the data of the {name} are")
    if all(each["steps"] is not None for each in said):
        keras_fit.shorten(given, said)
    elif given["steps_per_epoch"] is None:
        given["x"] = _of_unknown_length(given["x"], start)
    if given["validation_data"] is not None:
        given["validation_data"] = _until_all_end(
            model,
            f"the validation of {name}",
            given["validation_data"],
            given["batch_size"],
            given["validation_steps"],
        )
    given["callbacks"] = keras_fit.with_agreed_stop(given["callbacks"], name)


def evaluate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Model.evaluate`: every record of all ranks counts once.

    Raises:
        ValueError: a rank has another number of batches than another one, and not in a dataset.
        RankError: another rank does something else.
    """
    if collectives.size() == 1 or not tf.executing_eagerly():
        return original(model, *args, **kwargs)
    if kwargs.get("_use_cached_eval_dataset"):
        # Of `fit`, which has seen to the data. Keras would remember this rank's number of batches.
        handler = getattr(model, "_eval_data_handler", None)
        if handler is not None and getattr(model, "_collective_uneven", False):
            handler._inferred_steps = None
        return original(model, *args, **kwargs)
    return _evaluated("evaluate", original, model, *args, **kwargs)


def predict(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Model.predict`: each rank gets the predictions for its own records.

    Raises:
        ValueError: a rank has another number of batches than another one, and not in a dataset.
        RankError: another rank does something else.
    """
    if collectives.size() == 1 or not tf.executing_eagerly():
        return original(model, *args, **kwargs)
    return _evaluated("predict", original, model, *args, **kwargs)


def _evaluated(
    what: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    call = keras_fit.bound(original, model, args, kwargs)
    given = call.arguments
    name = f"the start of {what} of the Keras model '{model.name}'"
    data = (given["x"], given["batch_size"], given["steps"])
    given["x"] = _until_all_end(model, name, *data, warns=what == "evaluate")
    return original(*call.args, **call.kwargs)


def _until_all_end(
    model: Any, name: str, x: Any, batch_size: int | None, steps: Any, warns: bool = True
) -> Any:
    """Returns the data of an evaluation, which lasts until all ranks are out of data.

    Args:
        model: Keras's model.
        name: of the evaluation.
        x, batch_size, steps: Keras's arguments.
        warns: whether rank 0 warns where all ranks have the same records.
    """
    said = keras_fit.agreed(
        name,
        lambda: keras_fit.described_evaluation(x, batch_size, steps),
        ["batches"],
        may_be_unknown=True,
    )
    if warns and keras_fit.are_all_same(said) and collectives.rank() == 0:
        same_records.warn_of_evaluation(name.removeprefix("the start of "))
    counts = {each["steps"] for each in said}
    uneven = steps is None and (len(counts) > 1 or None in counts)
    per_execution = model._steps_per_execution
    if uneven and per_execution is not None and int(per_execution.numpy()) > 1:
        raise NotImplementedError(
            f"{name}: ranks have different numbers of batches, or don't know them "
            f"({[each['steps'] for each in said]}), which isn't possible with "
            f"steps_per_execution={int(per_execution.numpy())}. Pass steps, or compile the model "
            "without steps_per_execution."
        )
    vars(model)["_collective_uneven"] = uneven  # not tracked by Keras
    return _of_unknown_length(x, name) if uneven else x


def _of_unknown_length(x: Any, name: str) -> Any:
    """Returns a dataset that doesn't know its length."""
    if isinstance(x, DATASETS):
        return x.filter(lambda *_: True)
    if keras_fit.steps_of(x, None, None) is None:
        return x
    raise ValueError(
        f"{name}: another rank doesn't know how many batches it has. Pass tf.data datasets on all "
        "ranks, or the number of steps."
    )
