"""Has the optimizer's wrapper, the callbacks for `fit`, and what saves models."""

from __future__ import annotations

import os
from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.framework import say_once
from collective.compat.horovod_stand_in import keras_callbacks, process, training
from collective.keras.callbacks import Checkpoint
from collective.ops.communication import collectives
from collective.scope import SCOPES
from collective.tensorflow_internals.keras import OptimizerV2, package
from collective.tensorflow_internals.keras import optimizer as keras_optimizer


def DynamicEmbeddingOptimizer(
    self: Any, bp_v2: bool = False, synchronous: bool = False, **kwargs: Any
) -> Any:
    """Returns an optimizer of Keras as it is: inside scope() it gets gradients of all ranks.

    Args:
        self: the optimizer.
        bp_v2: no effect.
        synchronous: whether the ranks' gradients were to be added up. Here a step is always of
            their mean, which rank 0 says on several ranks.
        **kwargs: no effect.

    Raises:
        RuntimeError: no scope() is open.
        NotImplementedError: it isn't an optimizer of Keras.
    """
    del bp_v2, kwargs
    if not SCOPES.is_open:
        raise RuntimeError(
            "DynamicEmbeddingOptimizer needs scope(): start the script by `collective launch --as "
            "tfra`, or train in `with strategy.scope():`."
        )
    if not isinstance(self, (keras_optimizer.Optimizer, OptimizerV2)):
        raise NotImplementedError(
            f"DynamicEmbeddingOptimizer of {type(self).__name__} is not supported: give it an "
            "optimizer of tf.keras.optimizers."
        )
    collectives.init()
    if collectives.size() > 1:
        what = "synchronous=True" if synchronous else "synchronous=False"
        theirs = "the sum of the ranks' gradients" if synchronous else "each rank's own gradients"
        say_once(
            f"DynamicEmbeddingOptimizer({what}) there makes steps of {theirs}; here a step is of "
            "their mean, as in one process with the batches of all ranks."
        )
    return self


class DEHvdBroadcastGlobalVariablesCallback(keras_callbacks.BroadcastGlobalVariablesCallback):
    """Gives all ranks rank `root_rank`'s weights when training starts, tables left alone.

    Args:
        root_rank: the rank whose weights all get.
        device: no effect.
        local_variables: must be None or empty.

    Raises:
        NotImplementedError: there are local variables.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None):
        if local_variables is not None and not (
            isinstance(local_variables, (list, tuple)) and not local_variables
        ):
            raise NotImplementedError(
                "DEHvdBroadcastGlobalVariablesCallback(local_variables=…) is not supported: the "
                "variables of a model in scope() are equal on all ranks, except tables."
            )
        super().__init__(root_rank, device)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts the weights, and the variables that the optimizer has."""
        if not process.is_initialized():
            process.init()
        super().on_train_begin(logs)


_ModelCheckpoint: Any = package.callbacks.ModelCheckpoint


class DEHvdModelCheckpoint(_ModelCheckpoint):
    """Saves checkpoints of this library at the end of epochs: weights, tables and slots.

    All ranks have it. `collective.keras.callbacks.Checkpoint(folder).restore(model)` restores them.

    Args:
        filepath: the folder of a checkpoint, which may name the epoch and what logs have, as in
            `tf.keras.callbacks.ModelCheckpoint`.
        *args, **kwargs: as of that.

    Raises:
        NotImplementedError: signatures are given, or save_freq isn't 'epoch'.
    """

    def __init__(self, filepath: Any, *args: Any, **kwargs: Any):
        if kwargs.pop("signatures", None) is not None:
            raise NotImplementedError(_signatures("DEHvdModelCheckpoint"))
        super().__init__(filepath, *args, **kwargs)
        if self.save_freq != "epoch":
            raise NotImplementedError(
                f"DEHvdModelCheckpoint(save_freq={self.save_freq!r}) is not supported: it saves at "
                "the end of epochs. collective.keras.callbacks.Checkpoint(folder, save_freq=…) "
                "saves every so many steps."
            )

    def set_model(self, model: Any) -> None:
        """Notes the model, which is saved in checkpoints."""
        super().set_model(_SavedInCheckpoints(model))


class _SavedInCheckpoints:
    """A model whose files are checkpoints."""

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: Any, **_: Any) -> None:
        """Saves a checkpoint in a folder."""
        _write(self._model, filepath)

    save_weights = save


def de_save_model(
    model: Any,
    filepath: Any,
    overwrite: bool = True,
    include_optimizer: bool = True,
    signatures: Any = None,
    options: Any = None,
    save_traces: bool = True,
    **kwargs: Any,
) -> None:
    """Saves a checkpoint of a compiled model in a folder: weights, tables and slots.

    All ranks call it with the same folder. `collective.keras.callbacks.Checkpoint(folder)` restores
    it, and `strategy.export_saved_model` exports it for serving.

    Args:
        model: the model.
        filepath: the folder.
        overwrite: must be True if there is a checkpoint.
        include_optimizer, options, save_traces, **kwargs: no effect; slots are saved.
        signatures: must be None.

    Raises:
        NotImplementedError: signatures are given.
        ValueError: the folder has a checkpoint, and overwrite is False; or the model has no
            optimizer.
    """
    del include_optimizer, options, save_traces, kwargs
    if signatures is not None:
        raise NotImplementedError(_signatures("de.keras.models.save_model"))
    if not overwrite and tf.train.latest_checkpoint(filepath):
        raise ValueError(f"'{filepath}' has a checkpoint, and overwrite is False.")
    _write(model, filepath)


def de_hvd_save_model(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Does what `de_save_model` does, with all arguments but these two at their defaults."""
    del args, kwargs
    de_save_model(model, filepath)


def _write(model: Any, folder: Any) -> None:
    if not process.is_initialized():
        process.init()
    folder = training.broadcast_object(os.fspath(folder))
    say_once(
        "models of dynamic tables are saved in checkpoints of this library, here in "
        f"'{folder}': collective.keras.callbacks.Checkpoint(folder).restore(model) goes on with "
        "one, and strategy.export_saved_model exports it for serving."
    )
    Checkpoint(folder).save(model)


def _signatures(what: str) -> str:
    return (
        f"{what}(signatures=…) is not supported: it saves a checkpoint. Export a SavedModel with "
        "signatures by collective.CollectiveStrategy().export_saved_model."
    )
