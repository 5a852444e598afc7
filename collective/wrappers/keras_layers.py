"""Has Keras's layers that learn from data learn from the data of all ranks.

BatchNormalization(synchronized=True)    statistics of a batch are those of all ranks' batches; of
                                         other layers with scope(sync_batch_norm=True)
layer.adapt(data)                        means and vocabularies: ranks compare what they learned
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.replication import cross_replica
from collective.scope import SCOPES
from collective.tables.table import is_movable


def synchronized_moments(
    original: Callable[..., Any],
    layer: Any,
    x: tf.Tensor,
    reduction_axes: Any,
    keep_dims: bool,
    mask: Any = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces what a `BatchNormalization(synchronized=True)` computes a batch's statistics by.

    They are those of the batches of all ranks together, as in Keras those of all replicas: means of
    values and of their squares, in float32 if the values are float16. Gradients go through them.

    Returns:
        Mean and variance, of the type of `x`.

    Raises:
        NotImplementedError: the layer has a virtual_batch_size.
    """
    if cross_replica.is_alone():
        return original(layer, x, reduction_axes, keep_dims, mask=mask)
    _refuse_virtual(layer, "synchronized=True")
    values = tf.cast(x, tf.float32) if x.dtype == tf.float16 else x
    weights = _weights(values, mask)
    total, squares, count = _sums(
        layer, reduction_axes, [values * weights, tf.square(values * weights), weights]
    )
    mean = tf.math.divide_no_nan(total, count)
    # Rounded, the difference may be less than 0.
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0)
    return _squeezed(x, reduction_axes, keep_dims, mean, variance)


def moments(
    original: Callable[..., Any],
    layer: Any,
    x: tf.Tensor,
    reduction_axes: Any,
    keep_dims: bool,
    mask: Any = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces what other `BatchNormalization` layers compute a batch's statistics by.

    With `scope(sync_batch_norm=True)` they are those of the batches of all ranks together. The
    variance is the mean of the squared differences from the mean, as by `tf.nn.moments`.

    Raises:
        NotImplementedError: the layer has a virtual_batch_size, with that option.
    """
    if not SCOPES.options.sync_batch_norm or cross_replica.is_alone():
        return original(layer, x, reduction_axes, keep_dims, mask=mask)
    _refuse_virtual(layer, "scope(sync_batch_norm=True)")
    weights = _weights(x, mask)
    total, count = _sums(layer, reduction_axes, [x * weights, weights])
    mean = total / count
    differences = tf.square(x - tf.stop_gradient(mean)) * weights
    (squares,) = _sums(layer, reduction_axes, [differences])
    return _squeezed(x, reduction_axes, keep_dims, mean, squares / count)


def fused_batch_norm(
    original: Callable[..., Any], layer: Any, inputs: Any, mask: Any = None, training: Any = None
) -> Any:
    """Replaces `BatchNormalization._fused_batch_norm`: one operation normalises a rank's own batch.

    Raises:
        NotImplementedError: scope(sync_batch_norm=True), in training on several ranks.
    """
    is_synchronized = SCOPES.options.sync_batch_norm and not cross_replica.is_alone()
    if is_synchronized and tf.get_static_value(tf.convert_to_tensor(training)) not in (False, 0):
        raise NotImplementedError(
            f"The layer '{layer.name}' is fused: one operation normalises by the batch of its "
            "rank, whatever scope(sync_batch_norm=True) wants. Make it with fused=False."
        )
    return original(layer, inputs, mask=mask, training=training)


def _refuse_virtual(layer: Any, option: str) -> None:
    if layer.virtual_batch_size is not None:
        raise NotImplementedError(
            f"The layer '{layer.name}' has virtual_batch_size={layer.virtual_batch_size}: it "
            f"normalises parts of a batch, and {option} the batch of all ranks. Leave one of them "
            "out."
        )


def _weights(x: tf.Tensor, mask: Any) -> tf.Tensor:
    """Returns how often each value of `x` counts: once, or as often as its mask says."""
    weights = tf.ones_like(x)
    return weights if mask is None else weights * tf.cast(mask, x.dtype)[..., tf.newaxis]


def _sums(layer: Any, axes: Any, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sums over `axes`, which are kept, and over all ranks."""
    own = [tf.reduce_sum(x, axes, keepdims=True) for x in tensors]
    return cross_replica.sums(f"{layer.name}/moments", own)


def _squeezed(x: tf.Tensor, axes: Any, keep_dims: bool, *moments: tf.Tensor) -> Any:
    """Returns moments in the type of `x`, without `axes` unless they are to be kept."""
    return tuple(
        tf.cast(each if keep_dims else tf.squeeze(each, axes), x.dtype) for each in moments
    )


def adapt(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `adapt` of Keras's preprocessing layers: all ranks have to learn the same.

    All ranks call it.

    Raises:
        ValueError: another rank has learned another vocabulary, or other numbers.
        RankError: it failed on another rank, or another rank does something else.
    """
    if collectives.size() == 1 or not tf.executing_eagerly():
        return original(layer, *args, **kwargs)
    name = f"adapt of the layer '{layer.name}'"

    def learn() -> dict[str, Any]:
        original(layer, *args, **kwargs)
        return _learned(layer)

    said = barrier.run_on_all_ranks(None, name, learn)
    for rank, each in enumerate(said):
        difference = _difference(said[0], each, rank)
        if difference:
            raise ValueError(
                f"{name}: {difference}. Each rank would train a model of its own. Adapt on the "
                "same records in the same order on all ranks: pass the dataset as it is before "
                "strategy.shard."
            )
    return None


def _learned(layer: Any) -> dict[str, Any]:
    """Returns what a layer has learned: lists of numbers; of a vocabulary its size and a digest."""
    variables = [v for v in layer.weights if isinstance(v, tf2.Variable)]  # and no vocabulary
    numbers = [(v.name, v.numpy().ravel().tolist()) for v in variables if is_movable(v)]
    words = layer.get_vocabulary() if hasattr(layer, "get_vocabulary") else []
    digest = hashlib.blake2b(repr([str(word) for word in words]).encode(), digest_size=8)
    return {"numbers": numbers, "words": len(words), "digest": digest.hexdigest()}


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    """Says how rank 0's result of `_learned` differs from that of a rank; '' if it doesn't."""
    if first["digest"] != other["digest"]:
        sizes = [counted(each["words"], "word") for each in (first, other)]
        return (
            f"ranks have learned different vocabularies, rank 0 one of {sizes[0]}, and rank "
            f"{rank} another one, of {sizes[1]}"
        )
    for (name, own), (_, others) in zip(first["numbers"], other["numbers"]):
        a, b = np.array(own), np.array(others)
        if a.shape != b.shape:
            return (
                f"ranks have learned '{name}' of different sizes, {a.size} on rank 0, and {b.size} "
                f"on rank {rank}"
            )
        # Sums in another order, as on another processor, differ by less.
        differing = ~np.isclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
        if differing.any():
            return (
                f"ranks have learned different values of '{name}', {a[differing][0]:.6g} on rank "
                f"0, and {b[differing][0]:.6g} on rank {rank}"
            )
    return ""
