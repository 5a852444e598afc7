"""The mean over ranks of many dense tensors, in as few collectives as they have types."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import communication, gate, graphs
from collective.ops.compression import compressed_mean


def over_ranks(
    what: str, tensors: Sequence[tuple[str, tf.Tensor]], wire: tf.DType | None = None
) -> list[tf.Tensor]:
    """One allreduce per dtype for all of them, called by what it reduces. Half-precision tensors
    are added in float32.

    Args:
        what: they are, for the allreduce's name.
        tensors: (name, tensor), in the same order on every rank.
        wire: if given, one exchange for all of a floating type, in which they travel in that type.
    """
    by_dtype: dict[tf.DType, list[int]] = collections.defaultdict(list)
    for i, (_, x) in enumerate(tensors):
        half = x.dtype in (tf.float16, tf.bfloat16)
        by_dtype[wire if wire and x.dtype.is_floating else tf.float32 if half else x.dtype].append(
            i
        )
    out: list[Any] = [None] * len(tensors)
    for dtype, which in by_dtype.items():
        some = [tensors[i][1] for i in which]
        name, zero = _name_of(what, [tensors[i] for i in which]), opened(some)
        if dtype == wire:
            means = compressed_mean(
                some, dtype, communication.unique_name(f"{name}.{dtype.name}"), zero
            )
        else:
            sums = communication.allreduce_sum(
                [tf.cast(x, dtype) for x in some], communication.unique_name(name), zero
            )
            means = [total / tf.cast(communication.size(), dtype) for total in sums]
        for i, mean in zip(which, means):
            out[i] = tf.cast(mean, tensors[i][1].dtype)
            graphs.known_alike(mean.graph).update((mean.op, out[i].op))
    return out


def _name_of(what: str, tensors: Sequence[tuple[str, tf.Tensor]]) -> str:
    """A name by which ranks that reduce something else, or another shape, notice it before they do."""
    listed = "\n".join(f"{name} {x.shape} {x.dtype.name}" for name, x in tensors)
    return f"{what}.{hashlib.blake2b(listed.encode(), digest_size=4).hexdigest()}"


def opened(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """What a collective of `tensors` waits for: the gate."""
    return gate.gates_of(tf.get_default_graph()).beside(tensors).zero
