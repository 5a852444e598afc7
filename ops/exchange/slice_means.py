"""Averages replicated variables' sparse gradients over ranks.

A script gets the slices of all ranks, which travel by one allgather per type. No slices are added
up: a norm of them counts each occurrence, as in plain TensorFlow.

An optimizer adds up the slices of a row before anything else. If it gets them unchanged, fewer
bytes travel. The mean of small variables is a matrix in the allreduce of the step's dense
gradients, and the optimizer gets its rows:

    slices ──► matrix, and how many slices each row has ──► allreduce ──► rows with slices

Of other variables each rank sends each of its rows once, by one allgather per type:

    slices ──► each row's sum ──► allgather ──► the ranks' sums, divided by N

Runs that also read the slices of all ranks still get them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.communication.collectives import note_replicated
from collective.ops.communication.dense_allreduce import filled_later, opened, sum_type
from collective.ops.exchange import shard_gradients
from collective.ops.graph import device_scopes, graph_state, graphs, seen_operations

# The most elements in the matrices of a step (a megabyte of float32): about as many as travel in
# the time that a separate exchange takes. The number of elements is the same on all ranks; the
# number of slices isn't.
MOST_ELEMENTS = 1 << 18
# An index is sent as two numbers, even in a type that has no more than 24 bits for them.
_BASE = 1 << 22


@dataclasses.dataclass
class SliceMean:
    """Stands for a mean that may travel as a matrix.

    Attributes:
        own: this rank's slices.
        shape: the variable's shape.
        given: [E], what this rank puts into the allreduce; at first without elements.
        mean: [E], the ranks' mean of it.
        rows: the mean as rows, each once, if it travels as a matrix.
    """

    own: tf.IndexedSlices
    shape: list[int]
    given: tf.Tensor
    mean: tf.Tensor | None = None
    rows: tf.IndexedSlices | None = None


@dataclasses.dataclass
class RankSums:
    """Stands for gradients of which each rank may send each row once.

    Attributes:
        own: (name, this rank's slices) of each gradient, in the same order on every rank.
        everyones: the slices of all ranks, which a script gets.
        sums: what an optimizer gets instead, by the names of everyone's values; None until the
            first is asked for.
    """

    own: Sequence[tuple[str, tf.IndexedSlices]]
    everyones: Sequence[tf.IndexedSlices]
    sums: dict[str, tf.IndexedSlices] | None = None


@dataclasses.dataclass
class SliceMeans:
    """Records what an optimizer may get instead of everyone's slices, by the values' names.

    Attributes:
        by_values: the means of a graph that may travel as matrices.
        sums_by_values: gradients of which each rank may send each row once.
    """

    by_values: dict[str, SliceMean] = dataclasses.field(default_factory=dict)
    sums_by_values: dict[str, RankSums] = dataclasses.field(default_factory=dict)


def mean_slices(
    gradients: Sequence[tuple[str, tf.IndexedSlices]], once: bool = False
) -> list[tf.IndexedSlices]:
    """Returns the slices of all ranks, divided by N.

    Half-precision values travel in float32.

    Args:
        gradients: (name, slices), in the same order on every rank.
        once: adds up each rank's slices of a row before they travel.
    """
    if not gradients:
        return []
    every = [slices for _, slices in gradients]
    zero = opened([x for slices in every for x in (slices.values, slices.indices)])
    listed = "\n".join(f"{n} {s.values.shape[1:]} {s.values.dtype.name}" for n, s in gradients)
    digest = hashlib.blake2b(listed.encode(), digest_size=4).hexdigest()
    name = collectives.unique_name(f"sparse_gradients.{digest}")
    by_type: dict[tf.DType, list[int]] = collections.defaultdict(list)
    for i, slices in enumerate(every):
        by_type[sum_type(slices.values.dtype)].append(i)
    out = list(every)
    for dtype, places in by_type.items():
        own = [every[i] for i in places]
        for i, slices in zip(places, _everyones(own, dtype, f"{name}.{dtype.name}", zero, once)):
            out[i] = slices
    note_replicated(x for slices in out for x in (slices.values, slices.indices))
    return out


def _everyones(
    own: Sequence[tf.IndexedSlices], dtype: tf.DType, name: str, zero: tf.Tensor, once: bool
) -> list[tf.IndexedSlices]:
    """Returns the slices of all ranks for each of G gradients, by one allgather.

    A rank's message, all of `dtype`: the number of slices of each gradient, their indices, their
    values.
    """
    ranks, gradients = collectives.size(), len(own)
    sent = [(tf.cast(slices.values, dtype), slices.indices) for slices in own]
    if once:
        sent = [shard_gradients.summed(values, indices) for values, indices in sent]
    counts = tf.stack([tf.size(indices, out_type=tf.int64) for _, indices in sent])
    means = [values / tf.cast(ranks, dtype) for values, _ in sent]
    widths = tf.stack([tf.cast(tf.reduce_prod(tf.shape(x)[1:]), tf.int64) for x in means])
    message = [
        _as_numbers(counts, dtype),
        *(_as_numbers(tf.cast(indices, tf.int64), dtype) for _, indices in sent),
        *(tf.reshape(x, [-1]) for x in means),
    ]
    received = collectives.allgather(tf.concat(message, 0), name, zero)
    sizes, start = [], tf.zeros([], tf.int64)
    for _ in range(ranks):
        received_counts = _as_integers(received[start : start + 2 * gradients])
        head = tf.constant([2 * gradients], tf.int64)
        sizes.append(tf.concat([head, 2 * received_counts, received_counts * widths], 0))
        start += tf.reduce_sum(sizes[-1])
    pieces = 1 + 2 * gradients
    parts = tf.split(received, tf.concat(sizes, 0), num=ranks * pieces)
    whole = [tf.concat(parts[piece::pieces], 0) for piece in range(pieces)]
    out = []
    for slices, x, indices, values in zip(own, means, whole[1:], whole[1 + gradients :]):
        values = tf.reshape(values, tf.concat([[-1], tf.shape(x)[1:]], 0))
        values.set_shape([None, *x.shape[1:].as_list()])
        indices = tf.cast(_as_integers(indices), slices.indices.dtype)
        out.append(
            tf.IndexedSlices(tf.cast(values, slices.values.dtype), indices, slices.dense_shape)
        )
    return out


def _as_numbers(integers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns `integers` [E] int64, below 2**44 in size, as numbers [2 E] of `dtype`."""
    both = tf.stack([integers // _BASE, integers % _BASE], 1)
    return tf.cast(tf.reshape(both, [-1]), dtype)


def _as_integers(numbers: tf.Tensor) -> tf.Tensor:
    """Returns the integers [E] int64 of numbers [2 E]."""
    both = tf.cast(tf.reshape(numbers, [-1, 2]), tf.int64)
    return both[:, 0] * _BASE + both[:, 1]


# As matrices


def as_matrices(
    gradients: Sequence[tuple[tf.IndexedSlices, tf.TensorShape]],
) -> list[SliceMean]:
    """Returns for each gradient of some variables what may travel of it in an allreduce.

    That is nothing if the total is too large: then a separate exchange is needed anyway.

    Args:
        gradients: this rank's slices, and the variable's shape, which is known to all ranks.
    """
    elements = 0
    for _, shape in gradients:
        if not shape.is_fully_defined():
            return []
        elements += _elements(shape.as_list())
    if elements > MOST_ELEMENTS or not graphs.is_outside(tf.get_default_graph()):
        return []
    return [
        SliceMean(own, shape.as_list(), filled_later(sum_type(own.values.dtype)))
        for own, shape in gradients
    ]


def _elements(shape: Sequence[int]) -> int:
    """Returns how many numbers travel: the matrix, and one number per row."""
    return math.prod(shape) + shape[0]


def note(everyones: tf.IndexedSlices, mean: SliceMean) -> None:
    """Notes that `everyones`, which a script gets, may travel as `mean`."""
    means = graph_state.of(everyones.values.graph, SliceMeans)
    means.by_values[everyones.values.name] = mean


def note_sums(
    own: Sequence[tuple[str, tf.IndexedSlices]], everyones: Sequence[tf.IndexedSlices]
) -> None:
    """Notes that `everyones`, which a script gets, may travel with each row of a rank once.

    Args:
        own: what `mean_slices` was given.
        everyones: what it returned.
    """
    rank_sums = RankSums(own, everyones)
    for slices in everyones:
        means = graph_state.of(slices.values.graph, SliceMeans)
        means.sums_by_values[slices.values.name] = rank_sums


def of_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns what an optimizer gets for a gradient: if possible the mean's rows, each once, or
    each rank's rows, each once.

    It is possible if nobody has changed the slices of all ranks: the gradient holds them as they
    are.
    """
    graph = tf.get_default_graph()
    means = graph_state.of(graph, SliceMeans)
    mean = means.by_values.get(gradient.values.name)
    rank_sums = means.sums_by_values.get(gradient.values.name)
    if not graphs.is_outside(graph):
        return gradient
    if mean is not None:
        return _mean_of(mean, gradient)
    return gradient if rank_sums is None else _sums_of(rank_sums, gradient)


def _mean_of(mean: SliceMean, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    if mean.rows is None:
        if _is_read(gradient):
            return gradient
        if mean.given.op._id <= seen_operations.last(mean.given.graph):
            return gradient
        with _outside_scripts(mean.given.graph):
            mean.rows = _rows_of(mean, gradient)
    return mean.rows


def _sums_of(rank_sums: RankSums, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    if rank_sums.sums is None:
        pairs = zip(rank_sums.own, rank_sums.everyones)
        unread = [(own, slices) for own, slices in pairs if not _is_read(slices)]
        with _outside_scripts(gradient.values.graph):
            sums = mean_slices([own for own, _ in unread], once=True)
        rank_sums.sums = {slices.values.name: sum_ for (_, slices), sum_ in zip(unread, sums)}
    return rank_sums.sums.get(gradient.values.name, gradient)


def _is_read(slices: tf.IndexedSlices) -> bool:
    return bool(slices.values.consumers() or slices.indices.consumers())


@contextlib.contextmanager
def _outside_scripts(graph: tf.Graph) -> Iterator[None]:
    """Makes operations without the dependencies that a script gives its updates, which may wait for
    the allreduce."""
    with (
        graphs.open_for_changes(graph),
        graphs.outside(),
        device_scopes.anywhere(),
        tf.name_scope("collective/slices/"),
    ):
        yield


def _rows_of(mean: SliceMean, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    assert mean.mean is not None
    own, rows = mean.own, mean.shape[0]
    values = tf.cast(own.values, mean.given.dtype)
    matrix = tf.math.unsorted_segment_sum(values, own.indices, rows)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(own.indices), own.indices, rows)
    flat = tf.concat([tf.reshape(matrix, [-1]), tf.cast(counts, matrix.dtype)], 0)
    mean.given.op._update_input(0, flat)
    matrix = tf.reshape(mean.mean[:-rows], mean.shape)
    with_slices = tf.where(mean.mean[-rows:] > 0)[:, 0]
    values = tf.cast(tf.gather(matrix, with_slices), own.values.dtype)
    indices = shard_gradients.mark_distinct(tf.cast(with_slices, own.indices.dtype))
    note_replicated([values, indices])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
