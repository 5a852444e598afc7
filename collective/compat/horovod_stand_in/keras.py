"""Has the functions of `horovod.tensorflow.keras`: those of Keras models, and of plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.compat.horovod_stand_in import process, reductions, training
from collective.compat.horovod_stand_in.compression import Compression
from collective.scope import SCOPES
from collective.tensorflow_internals.keras import package


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    **options: Any,
) -> Any:
    """Returns an optimizer as it is: inside scope() it gets gradients of all ranks.

    The arguments are those of `horovod.tensorflow.keras.DistributedOptimizer`.

    Raises:
        RuntimeError: no scope() is open.
        NotImplementedError: an option needs Horovod itself, or would change results.
    """
    if not SCOPES.is_open:
        raise RuntimeError(
            process.unavailable("horovod.tensorflow.keras.DistributedOptimizer outside of scope()")
        )
    return training.DistributedOptimizer(
        optimizer,
        name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        **options,
    )


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns numbers that are reduced over ranks, eagerly as an array."""
    reduced = reductions.allreduce(
        tf.convert_to_tensor(value),
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )
    return _plain(reduced)


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns the ranks' numbers one after another, eagerly as an array."""
    return _plain(reductions.allgather(tf.convert_to_tensor(value), name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the numbers of rank `root_rank`, eagerly as an array."""
    return _plain(reductions.broadcast(tf.convert_to_tensor(value), root_rank, name))


def _plain(tensor: Any) -> Any:
    return np.asarray(tensor.numpy()) if tf.executing_eagerly() else tensor


def broadcast_global_variables(root_rank: int) -> Any:
    """Gives all global variables of a graph the values of a rank.

    Raises:
        RuntimeError: it is called eagerly, where no list has all variables; the text is Horovod's.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return training.broadcast_global_variables(root_rank)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model of Keras, with its optimizer; all ranks call it.

    The arguments are those of `horovod.tensorflow.keras.load_model`. A class of custom_optimizers
    is known by its name.
    """
    del compression, legacy_opts
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    return package.models.load_model(filepath, {**known, **(custom_objects or {})})
