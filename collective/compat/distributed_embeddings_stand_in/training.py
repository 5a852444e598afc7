"""Has distributed-embeddings' functions around a step, which is one of all ranks in scope()."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.horovod_stand_in import keras, keras_callbacks, training

BroadcastGlobalVariablesCallback = keras_callbacks.BroadcastGlobalVariablesCallback


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(*args: Any, **kwargs: Any) -> Any:
    """Returns a tape as it is: inside scope() its gradients are of all ranks.

    The arguments are those of `horovod.tensorflow.DistributedGradientTape`.
    """
    return training.DistributedGradientTape(*args, **kwargs)


def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:
    """Returns an optimizer as it is: inside scope() it gets gradients of all ranks.

    The arguments are those of `horovod.tensorflow.keras.DistributedOptimizer`.
    """
    return keras.DistributedOptimizer(*args, **kwargs)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(model_vars: Any, root_rank: int = 0) -> Any:
    """Gives variables rank `root_rank`'s values, tables left alone."""
    return training.broadcast_variables(model_vars, root_rank)
