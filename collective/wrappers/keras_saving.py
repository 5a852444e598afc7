"""Lets eager Keras models save whole tables: files of plain Keras, for any number of ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.functions import object_checkpoints, whole_files
from collective.coordination import barrier
from collective.errors import TableError
from collective.ops.communication import collectives
from collective.tables.table import Sharded
from collective.tensorflow_internals.keras import Model

# Not empty if ranks save models without tables by themselves, as scripts of Horovod do on rank 0.
_by_themselves: list[bool] = []
# Not empty while `Model.save` or `save_weights` writes.
_saves: list[bool] = []


def by_themselves() -> None:
    """Lets each rank save models without tables from now on, whatever the others do."""
    _by_themselves[:] = [True]


def save(
    original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Replaces `Model.save` and `Model.save_weights`: all ranks call it, and rank 0 writes.

    Every rank holds each table whole for a while. When it returns, the file is there for all ranks.

    Raises:
        TableError: it would make a SavedModel of a model with tables.
        RankError: it failed on another rank, or another rank does something else.
    """

    def write(path: Any) -> Any:
        _saves.append(True)
        try:
            return original(model, path, *args, **kwargs)
        finally:
            _saves.pop()

    if collectives.size() == 1 or not tf.executing_eagerly():
        return write(filepath)
    if _by_themselves and not any(isinstance(v, Sharded) for v in model.weights):
        return write(filepath)
    if original.__name__ == "save":
        _refuse_saved_model(model, filepath, *args, **kwargs)

    whole_files.write(
        f"saving the Keras model '{model.name}'",
        os.fspath(filepath),
        write,
    )
    return None


def save_model(
    original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces what `tf.keras.models.save_model` writes files by: it saves as `Model.save` does."""
    is_model = isinstance(model, Model) and not _saves
    return (model.save if is_model else functools.partial(original, model))(
        filepath, *args, **kwargs
    )


def to_bytes(original: Callable[..., Any], model: Any) -> Any:
    """Replaces what `copy.deepcopy` and `pickle` make of a model: each rank copies by itself.

    Raises:
        TableError: there are several ranks, and the model has tables.
    """
    if collectives.size() > 1 and tf.executing_eagerly():
        for v in model.weights:
            if isinstance(v, Sharded):
                raise TableError(
                    f"copy.deepcopy or pickle of the Keras model '{model.name}' with the table "
                    f"'{v.op.name}', whose rows are on several ranks: copy it by "
                    "tf.keras.models.clone_model(model) and set_weights(model.get_weights()) of "
                    "the copy, or save it on all ranks (model.save)."
                )
    _saves.append(True)
    try:
        return original(model)
    finally:
        _saves.pop()


def back_up(original: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces what `BackupAndRestore` saves and restores by: all ranks take part, rank 0 writes.

    Args:
        original: a method of Keras's `WorkerTrainingState`.
        state: that.
    """
    with object_checkpoints.together():
        return original(state, *args, **kwargs)


def delete_backup(original: Callable[..., Any], state: Any) -> None:
    """Replaces `WorkerTrainingState.delete_backup`: rank 0 deletes, for all ranks."""
    barrier.run_on_all_ranks(
        None,
        "deleting the backup of fit",
        lambda: original(state) if collectives.rank() == 0 else None,
    )


def _refuse_saved_model(
    model: Any, filepath: Any, overwrite: bool = True, save_format: str | None = None, **_: Any
) -> None:
    """Refuses a SavedModel of a model with tables; the arguments are those of `Model.save`."""
    del overwrite
    tables = [v for v in model.weights if isinstance(v, Sharded)]
    chosen = save_format or os.path.splitext(os.fspath(filepath))[1].lstrip(".")
    if tables and chosen not in ("keras", "keras_v3", "h5", "hdf5"):
        raise TableError(
            f"A SavedModel of the Keras model '{model.name}' isn't possible, as the rows of "
            f"'{tables[0].op.name}' are on several ranks. Export a functional or sequential model "
            "by strategy.export_saved_model(folder, model=model), or save the weights "
            "(model.save_weights('…h5')), and load them outside of scope() into the same model, "
            "which plain TensorFlow can save."
        )
