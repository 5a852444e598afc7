"""Averages many dense tensors over ranks, in as few collectives as they have types."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives, gate
from collective.ops.graph import graphs
from collective.ops.graph.graph_state import state_of


def over_ranks(
    what: str, tensors: Sequence[tuple[str, tf.Tensor]], wire: tf.DType | None = None
) -> list[tf.Tensor]:
    """Returns the means over ranks of all tensors, by one allreduce per dtype.

    Half-precision tensors are added in float32.

    Args:
        what: says what the tensors are, for the allreduce's name.
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
    for dtype, indices in by_dtype.items():
        values = [tensors[i][1] for i in indices]
        name, zero = _name_of(what, [tensors[i] for i in indices]), opened(values)
        if dtype == wire:
            means = compressed_mean(
                values, dtype, collectives.unique_name(f"{name}.{dtype.name}"), zero
            )
        else:
            sums = collectives.allreduce_sum(
                [tf.cast(x, dtype) for x in values], collectives.unique_name(name), zero
            )
            means = [total / tf.cast(collectives.size(), dtype) for total in sums]
        for i, mean in zip(indices, means):
            out[i] = tf.cast(mean, tensors[i][1].dtype)
            _note_replicated((mean, out[i]))
    return out


def _name_of(what: str, tensors: Sequence[tuple[str, tf.Tensor]]) -> str:
    """Returns a name by which ranks notice in time that they are to reduce different things."""
    listed = "\n".join(f"{name} {x.shape} {x.dtype.name}" for name, x in tensors)
    return f"{what}.{hashlib.blake2b(listed.encode(), digest_size=4).hexdigest()}"


def opened(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the zero of the gate that a collective of `tensors` waits for."""
    return gate.gates_of(tf.get_default_graph()).beside(tensors).zero


def compressed_mean(
    tensors: Sequence[tf.Tensor], wire: tf.DType, name: str, gate: Any
) -> list[tf.Tensor]:
    """Returns the element-wise means over ranks of `tensors`, each in its own type again.

    With one rank the tensors are returned as they are.

    A value is rounded twice, before each of its ways. Values too large for `wire` become infinite.

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
    """Returns the mean of the ranks' `x` [E] float32, [E] float32.

    Each rank gets everyone's values of one part, averages them, and sends the means to all.
    """
    ranks = collectives.size()

    @tf.custom_gradient
    def mean(x: tf.Tensor) -> Any:
        size = tf.size(x)
        part = (size + ranks - 1) // ranks
        sent = tf.cast(tf.pad(x, [[0, part * ranks - size]]), wire)
        received, _ = collectives.alltoall(sent, tf.fill([ranks], part), f"{name}.parts", gate)
        own_mean = tf.reduce_mean(tf.cast(tf.reshape(received, [ranks, part]), tf.float32), 0)
        # The means travel as integers: allgather adds the gate to its input, which would change the
        # bits of floats that are no numbers.
        bits = collectives.allgather(
            tf.bitcast(tf.cast(own_mean, wire), tf.int16), f"{name}.means", gate
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


def mean_slices(gradients: Sequence[tuple[str, tf.IndexedSlices]]) -> list[tf.IndexedSlices]:
    """Averages replicated variables' sparse gradients: every rank gets everyone's slices.

    However many there are, their indices travel by one allgather, and their values by one for each
    type. No slice is added to another: who takes a norm of the slices counts each occurrence, as in
    plain TensorFlow.

    Args:
        gradients: (name, slices), in the same order on every rank.
    """
    if not gradients:
        return []
    every = [slices for _, slices in gradients]
    zero = opened([x for slices in every for x in (slices.values, slices.indices)])
    listed = "\n".join(f"{n} {s.values.shape[1:]} {s.values.dtype.name}" for n, s in gradients)
    digest = hashlib.blake2b(listed.encode(), digest_size=4).hexdigest()
    name = collectives.unique_name(f"sparse_gradients.{digest}")
    indices, counts = _everyones_indices(every, f"{name}.indices", zero)
    by_dtype: dict[tf.DType, list[int]] = collections.defaultdict(list)
    for i, slices in enumerate(every):
        by_dtype[slices.values.dtype].append(i)
    values: dict[int, tf.Tensor] = {}
    for dtype, places in by_dtype.items():
        own = [every[i].values / tf.cast(collectives.size(), dtype) for i in places]
        widths = [tf.cast(tf.reduce_prod(tf.shape(x)[1:]), tf.int64) for x in own]
        sizes = tf.gather(counts, places, axis=1) * tf.stack(widths)
        flat = tf.concat([tf.reshape(x, [-1]) for x in own], 0)
        received = collectives.allgather(flat, f"{name}.{dtype.name}", zero)
        for i, x, whole in zip(places, own, _by_gradient(received, sizes, len(places))):
            values[i] = tf.reshape(whole, tf.concat([[-1], tf.shape(x)[1:]], 0))
            values[i].set_shape([None, *x.shape[1:].as_list()])
    out = [
        tf.IndexedSlices(values[i], tf.cast(indices[i], slices.indices.dtype), slices.dense_shape)
        for i, slices in enumerate(every)
    ]
    _note_replicated(x for slices in out for x in (slices.values, slices.indices))
    return out


def _note_replicated(tensors: Iterable[tf.Tensor]) -> None:
    """Notes that all ranks have the same."""
    for x in tensors:
        state_of(graphs.outermost(x.graph)).replicated_operations.add(x.op)


def _everyones_indices(
    gradients: Sequence[tf.IndexedSlices], name: str, zero: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns each gradient's indices of all ranks, and how many each rank has, int64 [N, G].

    A rank's message begins with its counts.
    """
    own = [tf.cast(slices.indices, tf.int64) for slices in gradients]
    own_counts = tf.stack([tf.size(x, out_type=tf.int64) for x in own])
    message = collectives.allgather(tf.concat([own_counts, *own], 0), name, zero)
    counts, start = [], tf.zeros([], tf.int64)
    for _ in range(collectives.size()):
        counts.append(message[start : start + len(own)])
        start += len(own) + tf.reduce_sum(counts[-1])
    heads = tf.fill([collectives.size(), 1], tf.constant(len(own), tf.int64))
    sizes = tf.concat([heads, tf.stack(counts)], 1)
    return _by_gradient(message, sizes, len(own) + 1)[1:], tf.stack(counts)


def _by_gradient(message: tf.Tensor, sizes: tf.Tensor, pieces: int) -> list[tf.Tensor]:
    """Returns each piece of all ranks' messages; `sizes` [N, pieces] are those of the pieces."""
    ranks = collectives.size()
    parts = tf.split(message, tf.reshape(sizes, [-1]), num=ranks * pieces)
    return [tf.concat(parts[piece::pieces], 0) for piece in range(pieces)]
