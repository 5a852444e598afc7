"""Averages many dense tensors over ranks, with few collectives.

Tensors of a type share an allreduce. Those of a large network have several: the gradients of one
layer travel while those of another are computed. Other values that a run adds up over ranks may
travel in an allreduce of gradients: it keeps an `OpenPlace`, which is empty until there is more to
add.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB
2020, section 3.2.3 (buckets of gradients).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives, gate
from collective.ops.communication.collectives import note_replicated
from collective.ops.graph import graph_state, graphs, seen_operations

# The bytes from which on an allreduce is long enough to be worth its fixed costs, and how many of
# them a call makes at most.
BUCKET_BYTES, BUCKETS = 4 << 20, 16


@dataclasses.dataclass
class OpenPlace:
    """Keeps a place in an allreduce for values of its type that come later.

    Attributes:
        given: [E], what this rank puts there; at first without elements.
        sums: [E], the ranks' sum.
        elements: the current number of elements.
    """

    given: tf.Tensor
    sums: tf.Tensor
    elements: Any = 0

    def add(self, flat: tf.Tensor) -> tf.Tensor:
        """Adds `flat` [F] to the place; returns the ranks' sum of it, [F].

        No session may have run the allreduce before, and `flat` may not depend on it.
        """
        first, size = self.elements, tf.size(flat)
        self.elements = first + size
        self.given.op._update_input(0, tf.concat([self.given.op.inputs[0], flat], 0))
        return self.sums[first : self.elements]


@dataclasses.dataclass
class OpenPlaces:
    """Records the places that a graph's allreduces of gradients keep for other values."""

    places: list[OpenPlace] = dataclasses.field(default_factory=list)


def over_ranks(
    what: str,
    tensors: Sequence[tuple[str, tf.Tensor]],
    wire: tf.DType | None = None,
    stays_open: bool = False,
) -> list[tf.Tensor]:
    """Returns the means over ranks of all tensors; those of a dtype share allreduces (`_buckets`).

    Half-precision tensors are added in float32.

    Args:
        what: says what the tensors are, for the allreduces' names.
        tensors: (name, tensor), in the same order on every rank.
        wire: if given, all floating types share exchanges, in which they travel in this type.
        stays_open: whether other values may still travel in an allreduce of each dtype
            (`open_places`), outside of branches, loops and functions.
    """
    by_dtype: dict[tf.DType, list[int]] = collections.defaultdict(list)
    for i, (_, x) in enumerate(tensors):
        by_dtype[wire if wire and x.dtype.is_floating else sum_type(x.dtype)].append(i)
    out: list[Any] = [None] * len(tensors)
    for dtype, indices in by_dtype.items():
        zero = opened([tensors[i][1] for i in indices])
        buckets = _buckets({i: _elements(tensors[i][1]) * dtype.size for i in indices})
        for bucket in buckets:
            members = [tensors[i] for i in bucket]
            name, values = _name_of(what, members), [x for _, x in members]
            if dtype == wire:
                name = collectives.unique_name(f"{name}.{dtype.name}")
                means = compressed_mean(values, dtype, name, zero)
            else:
                is_open = stays_open and bucket is buckets[-1]
                means = _means(name, [tf.cast(x, dtype) for x in values], zero, is_open)
            for i, mean in zip(bucket, means):
                out[i] = tf.cast(mean, tensors[i][1].dtype)
                note_replicated((mean, out[i]))
    return out


def _means(
    name: str, values: Sequence[tf.Tensor], zero: tf.Tensor, is_open: bool
) -> list[tf.Tensor]:
    """Returns the means over ranks of tensors of one dtype; `is_open` as `over_ranks` has it."""
    dtype = values[0].dtype
    outside = graphs.is_outside(tf.get_default_graph())
    later = [filled_later(dtype)] if is_open and outside else []
    sums = collectives.allreduce_sum([*values, *later], collectives.unique_name(name), zero)
    for given in later:
        places = graph_state.of(given.graph, OpenPlaces).places
        places.append(OpenPlace(given, sums.pop()))
    return [total / tf.cast(collectives.size(), dtype) for total in sums]


def _buckets(sizes: Mapping[int, int]) -> list[list[int]]:
    """Deals tensors to allreduces: each gets the next ones, until it is long enough.

    The order is that of names, in which layers mostly follow each other. It can't be that in which
    gradients are ready, as ranks may have made their layers in another one.

    Args:
        sizes: the bytes of each tensor, 0 if unknown.
    """
    enough = max(BUCKET_BYTES, sum(sizes.values()) // BUCKETS)
    buckets: list[list[int]] = []
    filled = enough
    for i, size in sizes.items():
        if filled >= enough:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += size
    if filled < enough and buckets[1:]:
        rest = buckets.pop()
        buckets[-1] += rest
    return buckets


def _elements(x: tf.Tensor) -> int:
    return x.shape.num_elements() or 0


def open_places(graph: tf.Graph) -> list[OpenPlace]:
    """Returns the places in a graph's allreduces to which values can still be added."""
    places, seen = graph_state.of(graph, OpenPlaces).places, seen_operations.last(graph)
    return [each for each in places if each.given.op._id > seen]


def sum_type(dtype: tf.DType) -> tf.DType:
    """Returns the type in which values of `dtype` are added up."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def filled_later(dtype: tf.DType) -> tf.Tensor:
    """Returns a tensor [E] without elements, whose operation's input may be replaced later.

    TensorFlow lets an input be replaced only by a tensor of a compatible shape; here it knows no
    shape.
    """
    empty = tf.placeholder_with_default(tf.zeros([0], dtype), [None])
    return tf.placeholder_with_default(empty, [None])


def _name_of(what: str, tensors: Sequence[tuple[str, tf.Tensor]]) -> str:
    """Returns a name that lets ranks notice in time that they would reduce different things."""
    listed = "\n".join(f"{name} {x.shape} {x.dtype.name}" for name, x in tensors)
    return f"{what}.{hashlib.blake2b(listed.encode(), digest_size=4).hexdigest()}"


def opened(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the zero of the gate for which a collective of `tensors` waits."""
    return gate.gates_of(tf.get_default_graph()).of_collective(tensors).zero


def compressed_mean(
    tensors: Sequence[tf.Tensor], wire: tf.DType, name: str, gate: Any
) -> list[tf.Tensor]:
    """Returns the element-wise means over ranks of `tensors`, each in its own type again.

    With one rank the tensors are returned unchanged.

    A value is rounded twice, once before each transfer. Values too large for `wire` become
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
    """Returns the mean of the ranks' `x` [E] float32, [E] float32.

    Each rank gets all ranks' values of one part, averages them, and sends the means to all.
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
        # bits of NaNs.
        bits = collectives.allgather(
            tf.bitcast(tf.cast(own_mean, wire), tf.int16), f"{name}.means", gate
        )
        # Linear, and its own transpose: the gradient of the sum of all ranks' outputs is the mean
        # of their gradients.
        return tf.cast(tf.bitcast(bits[:size], wire), tf.float32), lambda gradient: _mean(
            gradient,
            wire,
            collectives.unique_name(name[len(collectives.PREFIX) :] + ".gradient"),
            gate,
        )

    return mean(x)
