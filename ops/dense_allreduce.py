"""The mean over ranks of many dense tensors, in as few collectives as they have types."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import collectives, gate, graphs
from collective.ops.graph_state import state_of


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
                some, dtype, collectives.unique_name(f"{name}.{dtype.name}"), zero
            )
        else:
            sums = collectives.allreduce_sum(
                [tf.cast(x, dtype) for x in some], collectives.unique_name(name), zero
            )
            means = [total / tf.cast(collectives.size(), dtype) for total in sums]
        for i, mean in zip(which, means):
            out[i] = tf.cast(mean, tensors[i][1].dtype)
            known = state_of(graphs.outermost(mean.graph)).replicated_operations
            known.update((mean.op, out[i].op))
    return out


def _name_of(what: str, tensors: Sequence[tuple[str, tf.Tensor]]) -> str:
    """A name by which ranks that reduce something else, or another shape, notice it before they do."""
    listed = "\n".join(f"{name} {x.shape} {x.dtype.name}" for name, x in tensors)
    return f"{what}.{hashlib.blake2b(listed.encode(), digest_size=4).hexdigest()}"


def opened(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """What a collective of `tensors` waits for: the gate."""
    return gate.gates_of(tf.get_default_graph()).beside(tensors).zero


def compressed_mean(
    tensors: Sequence[tf.Tensor], wire: tf.DType, name: str, gate: Any
) -> list[tf.Tensor]:
    """The element-wise means over ranks of `tensors`, each in its own type again; with one rank,
    what they are.

    A value is rounded twice, before each of its ways. What is too large for `wire` becomes
    infinite.

    Args:
        tensors: of any floating types, of the same shapes on every rank.
        wire: tf.float16 or tf.bfloat16.
        name: the explicit name.
        gate: the gate's zero.
    """
    if collectives.size() == 1:
        return [tf.identity(x) for x in tensors]
    shapes = [tf.shape(x) for x in tensors]
    flat = tf.concat([tf.reshape(tf.cast(x, tf.float32), [-1]) for x in tensors], 0)
    pieces = tf.split(
        _mean(flat, wire, name, gate), [tf.reduce_prod(shape) for shape in shapes], num=len(tensors)
    )
    out = [
        tf.cast(tf.reshape(piece, shape), x.dtype)
        for piece, shape, x in zip(pieces, shapes, tensors)
    ]
    for mean, x in zip(out, tensors):
        mean.set_shape(x.shape)
    return out


def _mean(x: tf.Tensor, wire: tf.DType, name: str, gate: Any) -> tf.Tensor:
    """[E] float32, the mean of the ranks' `x` [E] float32."""
    ranks = collectives.size()

    @tf.custom_gradient
    def mean(x: tf.Tensor) -> Any:
        size = tf.size(x)
        part = (size + ranks - 1) // ranks
        # 1
        sent = tf.cast(tf.pad(x, [[0, part * ranks - size]]), wire)
        # 2
        received, _ = collectives.alltoall(sent, tf.fill([ranks], part), f"{name}.parts", gate)
        # 3
        mine = tf.reduce_mean(tf.cast(tf.reshape(received, [ranks, part]), tf.float32), 0)
        # As integers: the gate is added to what is gathered, and no float but its own keeps the
        # bits of infinity.
        # 4
        bits = collectives.allgather(
            tf.bitcast(tf.cast(mine, wire), tf.int16), f"{name}.means", gate
        )
        # Linear, and its own transpose: the gradient of the sum of all ranks' outputs is the mean
        # of theirs.
        return tf.cast(tf.bitcast(bits[:size], wire), tf.float32), lambda gradient: _mean(
            gradient,
            wire,
            collectives.unique_name(name[len(collectives.PREFIX) :] + ".gradient"),
            gate,
        )

    return mean(x)


def mean_slices(gradient: tf.IndexedSlices, x: Any) -> tf.IndexedSlices:
    """A replicated variable's sparse gradient stays sparse: every rank gets everyone's slices."""
    name, zero = (
        x.name.partition(":")[0],
        opened([gradient.values, gradient.indices]),
    )
    values = collectives.allgather(
        gradient.values / tf.cast(collectives.size(), gradient.dtype),
        collectives.unique_name(f"{name}/gradient_values"),
        zero,
    )
    indices = collectives.allgather(
        gradient.indices, collectives.unique_name(f"{name}/gradient_indices"), zero
    )
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
