"""Keeps Keras's layers from silently learning what only one rank has seen.

BatchNormalization(synchronized=True)    statistics of a batch are those of its rank: refused
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
from collective.tables.table import is_movable


def refuse_synchronized(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces what a `BatchNormalization(synchronized=True)` computes a batch's statistics by.

    Raises:
        NotImplementedError: there are several ranks.
    """
    if collectives.size() == 1:
        return original(layer, *args, **kwargs)
    raise NotImplementedError(
        f"The layer '{layer.name}' is a BatchNormalization with synchronized=True (a "
        "SyncBatchNormalization), but ranks don't share a batch's mean and variance. Use "
        "BatchNormalization() instead: it normalises by the batch of its rank, and its moving "
        "averages are the means over all ranks."
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
