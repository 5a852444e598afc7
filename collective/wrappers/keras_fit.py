"""Lets `fit` and `evaluate` of Keras models in a graph go the same way on all ranks.

In a graph Keras loops over batches itself, in Python (Keras's `training_v1`). Each rank's loop has
to make the same runs: as many batches in an epoch, and as many epochs. And what callbacks decide by
(`EarlyStopping`, `ReduceLROnPlateau`) has to be a value of all ranks: the loss is, as metrics are.

    rank 0: 5 batches ─┐                     ┌─ fit: 4 batches of each
                       ├─► the ranks agree ──┤
    rank 1: 4 batches ─┘                     └─ evaluate: 5; rank 1's last one has no records
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination import agreement, barrier
from collective.data import same_records, shuffled_data
from collective.ops.communication import collectives, fused_reductions
from collective.ops.communication.fused_reductions import Reduction
from collective.ops.counting import counted
from collective.tensorflow_internals.keras import Callback, backend, package
from collective.wrappers import keras_callbacks, keras_settings

_SAME_FOR_ALL = (
    "Callbacks change it by what is the same on all ranks: by the logs of epochs, not those of "
    "batches, and on all ranks."
)
DATASETS = (tf.data.Dataset, tf2.data.Dataset)
# Of the batches that Keras makes of arrays.
_BATCH = 32
# What helps where ranks differ, by what they differ in.
_SAME = {
    "epochs": "Pass the same on all ranks.",
    "records": "Ranks may have different numbers of records in tf.data datasets, not in arrays.",
    "batches": "Ranks may have different numbers of batches in tf.data datasets without steps.",
}


def make_function(original: Callable[..., Any], model: Any) -> None:
    """Replaces `_make_train_function` and `_make_test_function`: their loss is that of all ranks.

    It is the mean over the records of the step on all ranks. Gradients are of this rank's loss, as
    before.
    """
    if collectives.size() == 1:
        return original(model)
    plain = backend.function

    def function(inputs: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(inputs, [_of_all_ranks(model, outputs[0]), *outputs[1:]], *args, **kwargs)

    backend.function = function
    try:
        return original(model)
    finally:
        backend.function = plain


def _of_all_ranks(model: Any, loss: Any) -> Any:
    if not isinstance(loss, tf.Tensor) or loss.shape.rank != 0:
        return loss
    with tf.name_scope("collective/keras_loss"):
        records = tf.cast(tf.shape(tf.nest.flatten(model.outputs)[0])[0], tf.float32)
        # A rank without records adds none: the mean over nothing may be no number.
        added = tf.where_v2(records > 0, tf.cast(loss, tf.float32) * records, 0.0)
        name = collectives.unique_name(f"collective.keras.{model.name}.loss")
        sums = fused_reductions.of_all_ranks(name, tf.stack([added, records]), Reduction.SUM)
        return tf.cast(tf.div_no_nan(sums[0], sums[1]), loss.dtype)


def fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Model.fit` in a graph: all ranks make the same steps, and stop together.

    An epoch has as many batches as the rank with the fewest has. The progress bar is rank 0's.

    Raises:
        ValueError: a rank doesn't know how many batches it has, or another one has other epochs.
        RankError: another rank does something else.
    """
    if collectives.size() == 1:
        return original(model, *args, **kwargs)
    call = bound(original, model, args, kwargs)
    given = call.arguments
    name = f"fit of the Keras model '{model.name}'"
    said = agreed(f"the start of {name}", lambda: described(given), same=["epochs"])
    if are_all_same(said) and collectives.rank() == 0:
        same_records.warn(f"the data of the {name} are")
    shorten(given, said)
    if given["validation_data"] is not None:
        given["validation_data"] = _padded(
            f"the validation of {name}",
            given["validation_data"],
            given["batch_size"],
            given["validation_steps"],
        )
    given["callbacks"] = with_agreed_stop(given["callbacks"], name)
    return original(*call.args, **call.kwargs)


def evaluate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Model.evaluate` in a graph: every record of all ranks counts once.

    A rank with fewer batches than another one evaluates batches without records at the end.

    Raises:
        ValueError: a rank doesn't know how many batches it has; or has another number of them than
            another rank, and not in a dataset.
        RankError: another rank does something else.
    """
    if collectives.size() == 1:
        return original(model, *args, **kwargs)
    call = bound(original, model, args, kwargs)
    given = call.arguments
    name = f"the start of evaluate of the Keras model '{model.name}'"
    given["x"] = _padded(name, given["x"], given["batch_size"], given["steps"])
    return original(*call.args, **call.kwargs)


def bound(
    original: Callable[..., Any], model: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """Returns all arguments of a call, by which only rank 0 shows progress."""
    call = inspect.signature(original).bind(model, *args, **kwargs)
    call.apply_defaults()
    if collectives.rank() != 0:
        call.arguments["verbose"] = 0
    return call


def described(given: dict[str, Any]) -> dict[str, Any]:
    """Returns what a rank says of the arguments of its `fit`.

    Raises:
        NotImplementedError: a callback would decide by what is of one rank.
    """
    keras_callbacks.check(callbacks_in(given["callbacks"]))
    steps = given["steps_per_epoch"]
    return {
        "steps": steps_of(given["x"], given["batch_size"], steps),
        "records": None if steps is not None else records_of(given["x"]),
        "epochs": [given["initial_epoch"], given["epochs"]],
        "whole": same_records.digest_of_all(given["x"]),
    }


def described_evaluation(x: Any, batch_size: int | None, steps: int | None) -> dict[str, Any]:
    """Returns what a rank says of the data of an evaluation."""
    known = steps_of(x, batch_size, steps)
    records = None if steps is not None else records_of(x)
    can_differ = isinstance(x, DATASETS) and steps is None
    return {
        "steps": known,
        "records": records,
        "batches": None if can_differ else known,
        "whole": same_records.digest_of_all(x),
    }


def steps_of(x: Any, batch_size: int | None, steps: int | None) -> int | None:
    """Returns how many batches a loop over `x` has on this rank; None if nobody knows."""
    if steps is not None:
        return int(steps)
    if isinstance(x, DATASETS):
        known = int(backend.get_value(tf.data.experimental.cardinality(x)))
        return known if known >= 0 else None
    if isinstance(x, package.utils.Sequence):
        return len(x)
    records = records_of(x)
    return None if records is None else math.ceil(records / (batch_size or _BATCH))


def note_data(model: Any, given: dict[str, Any]) -> None:
    """Notes the data of `fit`, and since which epoch it goes on in them, if none begins again.

    Args:
        model: that is trained.
        given: the arguments of `fit`.
    """
    x, steps = given["x"], given["steps_per_epoch"]
    goes_on = hasattr(x, "__next__")
    if isinstance(x, DATASETS):
        count = int(backend.get_value(tf.data.experimental.cardinality(x)))
        goes_on = steps is not None and count != steps
    elif not isinstance(x, package.utils.Sequence):
        goes_on = goes_on or bool(given["shuffle"])  # arrays, in one order after another
    vars(model)["_collective_first_epoch"] = given["initial_epoch"] if goes_on else None
    vars(model)["_collective_data"] = None if goes_on else given


def pass_over_epochs(model: Any, epoch: int) -> None:
    """Brings the data of `fit` into the order that they have in an epoch.

    Args:
        model: that is trained.
        epoch: the epoch in which `fit` goes on, from 0.
    """
    given = vars(model).get("_collective_data")
    if given is None:
        return
    frequency = given["validation_freq"]
    for passed in range(given["initial_epoch"], epoch):
        shuffled_data.pass_over(given["x"], given["steps_per_epoch"])
        is_validated = (
            (passed + 1) % frequency == 0 if isinstance(frequency, int) else passed + 1 in frequency
        )
        if is_validated:
            shuffled_data.pass_over(given["validation_data"], given["validation_steps"], 2)


def steps_of_epochs(model: Any, steps: int | None, epoch: int) -> int:
    """Returns how many batches of its data `fit` takes before an epoch.

    Args:
        model: that is trained.
        steps: of an epoch.
        epoch: the epoch, from 0.
    """
    first = vars(model).get("_collective_first_epoch")
    return 0 if first is None or steps is None else max(0, epoch - first) * steps


def records_of(x: Any) -> int | None:
    """Returns how many records arrays have; None if `x` isn't made of arrays."""
    parts = tf.nest.flatten(x)
    if not parts or not all(isinstance(part, np.ndarray) and part.ndim for part in parts):
        return None
    return len(parts[0])


def agreed(
    name: str,
    describe: Callable[[], dict[str, Any]],
    same: Sequence[str],
    may_be_unknown: bool = False,
) -> list[dict[str, Any]]:
    """Returns what every rank says; an error on one rank is an error on all.

    Args:
        name: of this meeting of the ranks.
        describe: returns what this rank says: its number of batches, "steps", which is None if it
            doesn't know, and more.
        same: the names of what has to be the same on all ranks.
        may_be_unknown: whether ranks find out together where the batches end.
    """
    said = barrier.run_on_all_ranks(None, name, describe)
    unknown = [rank for rank, each in enumerate(said) if each["steps"] is None]
    if unknown and not may_be_unknown:
        raise ValueError(
            f"{name}: rank {unknown[0]} doesn't know how many batches it has. All ranks have to "
            "make the same steps: pass steps_per_epoch (evaluate: steps), or tell the dataset "
            "its length by dataset.apply(tf.data.experimental.assert_cardinality(batches))."
        )
    for what in same:
        for rank, each in enumerate(said):
            if each[what] != said[0][what]:
                raise ValueError(
                    f"{name}: {what} is {said[0][what]} on rank 0, and {each[what]} on rank "
                    f"{rank}. {_SAME[what]}"
                )
    return said


def are_all_same(said: Sequence[dict[str, Any]]) -> bool:
    """Tells whether all ranks were given the same records, of what they said."""
    return said[0]["whole"] is not None and len({each["whole"] for each in said}) == 1


def shorten(given: dict[str, Any], said: Sequence[dict[str, Any]]) -> None:
    """Leaves of what `fit` was given what all ranks have.

    Args:
        given: the arguments of `fit`.
        said: every rank's number of batches, and of records in arrays.
    """
    x, steps = given["x"], min(each["steps"] for each in said)
    counts = [each["records"] for each in said]
    if None not in counts and len(set(counts)) > 1:
        # Keras weighs a batch's loss by its records: they have to be as many on all ranks.
        records = min(counts)
        for what in ("x", "y", "sample_weight"):
            given[what] = tf.nest.map_structure(
                lambda part: part if part is None else part[:records], given[what]
            )
        left = counted(records, "record")
    elif any(each["steps"] != steps for each in said):
        if given["steps_per_epoch"] is None and isinstance(x, DATASETS):
            given["x"] = x.take(steps)
        else:
            given["steps_per_epoch"] = steps
        left = counted(steps, "batch", "batches")
    else:
        return
    if collectives.rank() == 0:
        tf.logging.warning(
            "An epoch has %s of each rank, as many as the rank with the fewest", left
        )


def _padded(name: str, x: Any, batch_size: int | None, steps: int | None) -> Any:
    """Returns the data of an evaluation on all ranks, which takes as many batches on each.

    Args:
        name: of the meeting of the ranks.
        x: a dataset, arrays, or what else Keras takes.
        batch_size: of arrays.
        steps: what the script says; None if it says nothing.
    """
    said = agreed(
        name, lambda: described_evaluation(x, batch_size, steps), same=["records", "batches"]
    )
    own, most = said[collectives.rank()]["steps"], max(each["steps"] for each in said)
    if own == most:
        return x
    return x.concatenate(x.take(1).map(_without_records).repeat(most - own))


def _without_records(*batch: Any) -> Any:
    parts = tf.nest.map_structure(lambda part: part[:0], batch, expand_composites=False)
    return parts[0] if len(parts) == 1 else parts


class _AgreedStop(Callback):
    """Stops all ranks after an epoch at which one wants to stop."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._is_inside(True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._is_inside(False)
        name = f"the end of epoch {epoch + 1} in {self._name}"
        of_optimizer = keras_settings.of_optimizer(self.model) if tf.executing_eagerly() else {}
        own = {"stops": bool(self.model.stop_training), "settings": of_optimizer}
        said = barrier.exchange(None, name, own)
        self.model.stop_training = any(each["stops"] for each in said)
        keras_settings.compare(name, [each["settings"] for each in said], _SAME_FOR_ALL)

    def _is_inside(self, epoch: bool) -> None:
        model: Any = self.model
        vars(model)["_collective_epoch"] = epoch  # not tracked by Keras


def stopping(model: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, peers of this rank are told why its epoch is over, if a callback has ended it."""
    if model.stop_training and getattr(model, "_collective_epoch", False):
        return agreement.because(
            "a callback set stop_training in the middle of an epoch, by what is of this rank "
            "alone: set it in on_epoch_end, or at the same batch on all ranks"
        )
    return contextlib.nullcontext()


def with_agreed_stop(callbacks: Any, name: str) -> Any:
    """Returns `callbacks` with one more, which comes last."""
    stop = _AgreedStop(name)
    if isinstance(callbacks, package.callbacks.CallbackList):
        callbacks.append(stop)
        return callbacks
    return [*callbacks_in(callbacks), stop]


def callbacks_in(callbacks: Any) -> list[Any]:
    """Returns the callbacks that `fit` was given in whatever form."""
    if isinstance(callbacks, package.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [each for each in tf.nest.flatten(callbacks) if each is not None]
