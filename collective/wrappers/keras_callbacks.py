"""Lets Keras's callbacks that look at single batches decide alike on all ranks, or refuses them.

Logs of a batch are those of this rank's records, in eager models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.tensorflow_internals.keras import package


def end_batch(original: Callable[..., Any], callback: Any, batch: int, logs: Any = None) -> None:
    """Replaces `TerminateOnNaN.on_batch_end`: all ranks stop after a batch of which one has a loss
    that is no number, as the loss of the whole batch is none then.

    All ranks have the callback.

    Raises:
        RankError: another rank does something else.
    """
    original(callback, batch, logs)
    if collectives.size() == 1 or not tf.executing_eagerly():
        return
    model = callback.model
    name = f"TerminateOnNaN after a batch in fit of the Keras model '{model.name}'"
    said = barrier.exchange(None, name, {"stops": bool(model.stop_training)})
    model.stop_training = any(each["stops"] for each in said)


def check(callbacks: Sequence[Any]) -> None:
    """Refuses callbacks that would decide by the logs of a batch.

    Raises:
        NotImplementedError: a `ModelCheckpoint` saves the best of single batches, on several ranks.
    """
    if collectives.size() == 1 or not tf.executing_eagerly():
        return
    for callback in callbacks:
        is_checkpoint = isinstance(callback, package.callbacks.ModelCheckpoint)
        if is_checkpoint and callback.save_best_only and callback.save_freq != "epoch":
            raise NotImplementedError(
                f"ModelCheckpoint(save_best_only=True, save_freq={callback.save_freq}) decides by "
                "the logs of a batch, which are of a rank's own records: ranks would save at "
                "different batches. Use save_freq='epoch', whose logs are of all ranks, or "
                "save_best_only=False."
            )
