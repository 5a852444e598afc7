"""Has Horovod's collectives and their gradients, over this library's carriers.

Each call is two collectives. In the first the ranks compare what they are about to do; if types,
shapes or options differ, each rank gets an error instead of a number. The second moves the data.

Both find their peers by the name of the call, as Horovod's do: `name`, or else the name of the
tensor, within the open name scope. So ranks may start them in any order. Gradients are those that
Horovod 0.28.1 registers: that of an allreduce is the same allreduce of the gradient; those of an
allgather and a broadcast are parts of the gradient's mean over ranks.

Source: Horovod 0.28.1, horovod/tensorflow/mpi_ops.py.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.horovod_stand_in import eager, process
from collective.compat.horovod_stand_in.compression import Compression
from collective.compat.horovod_stand_in.process import Average, Max, Min, Product, Sum
from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.graph import device_scopes, graph_state, graphs
from collective.scope import SCOPES
from collective.tensorflow_internals.graphs import attr_value_pb2

_TITLES = {Average: "Average", Sum: "Sum", Min: "Min", Max: "Max", Product: "Product"}
_FOLDS = {Min: tf.reduce_min, Max: tf.reduce_max, Product: tf.reduce_prod}


@dataclass
class RunTimeZero:
    """Records an int32 zero of a graph that exists only at run time; None until it is needed."""

    zero: tf.Tensor | None = None


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = process.global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor, or `tf.IndexedSlices`, over ranks.

    The arguments and the result are those of `horovod.tensorflow.allreduce`.
    """
    (reduced,) = grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
    )
    return reduced


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = process.global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces tensors, or `tf.IndexedSlices`, over ranks in one exchange for each type.

    The arguments and the result are those of `horovod.tensorflow.grouped_allreduce`.
    """
    _check(process_set)
    reduction = _reduction(op, average)
    if graphs.is_eager():
        scales = prescale_factor, postscale_factor
        return eager.allreduce(tensors, _TITLES[reduction], scales, compression, name)
    results: list[Any] = list(tensors)
    dense: dict[tf.DType, list[tuple[int, Any, Any]]] = {}
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            if reduction not in (Sum, Average):
                raise NotImplementedError(
                    "Only Sum and Average ops are supported with tf.IndexedSlices"
                )
            if (prescale_factor, postscale_factor) != (1.0, 1.0):
                raise NotImplementedError(
                    "Pre/postscale_factor are not supported with tf.IndexedSlices"
                )
            with tf.device(device_sparse):
                results[place] = _gathered(tensor, reduction, ignore_name_scope)
        else:
            with tf.device(device_dense):
                sent, context = compression.compress(_tensor(tensor))
            dense.setdefault(sent.dtype, []).append((place, sent, context))
    for sent_type, members in dense.items():
        first, last = (_name_of(tensors[members[end][0]]) for end in (0, -1))
        auto = f"HorovodAllreduce_{first}" + (f"_{last}" if len(members) > 1 else "")
        given = f"{name}_{sent_type.name}" if name and len(dense) > 1 else name
        with tf.device(device_dense):
            reduced = _reduced(
                [sent for _, sent, _ in members],
                reduction,
                (prescale_factor, postscale_factor),
                _call_name(given or auto, ignore_name_scope),
            )
            for (place, _, context), result in zip(members, reduced):
                results[place] = compression.decompress(result, context)
    return results


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = process.global_process_set,
) -> tf.Tensor:
    """Returns the ranks' tensors one after another; their first dimensions may differ.

    The arguments and the result are those of `horovod.tensorflow.allgather`.
    """
    _check(process_set)
    if graphs.is_eager():
        return eager.allgather(tensor, name)
    x = _tensor(tensor)
    if process.size() == 1:
        return tf.identity(x)
    called = _call_name(name or f"HorovodAllgather_{_name_of(tensor)}", ignore_name_scope)
    wire = tf.cast(x, tf.uint8) if x.dtype == tf.bool else x
    gate = _agreed("allgather", called, [wire], first_dimension=False)
    gathered = _with_mean_gradient(collectives.allgather(wire, called, gate))
    gathered.set_shape([None, *x.shape[1:]] if x.shape.rank is not None else None)
    return tf.cast(gathered, tf.bool) if x.dtype == tf.bool else gathered


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = process.global_process_set,
) -> list[tf.Tensor]:
    """Gathers several tensors; see `allgather`."""
    return [allgather(tensor, name, ignore_name_scope, process_set) for tensor in tensors]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = process.global_process_set,
) -> tf.Tensor:
    """Returns the tensor of rank `root_rank`, whose shape is the same on every rank.

    The arguments and the result are those of `horovod.tensorflow.broadcast`.
    """
    _check(process_set)
    if graphs.is_eager():
        return eager.broadcast([tensor], root_rank, f"hvd.broadcast of {name or 'a tensor'}")[0]
    x = _tensor(tensor)
    called = _call_name(name or f"HorovodBroadcast_{_name_of(tensor)}", ignore_name_scope)
    if process.size() == 1:
        return tf.identity(x)

    @tf.custom_gradient
    def sent(x: tf.Tensor) -> Any:
        def mean_at_root(gradient: Any) -> tf.Tensor:
            mean = allreduce(tf.convert_to_tensor(gradient), name=f"{name or 'broadcast'}.gradient")
            # No constant: TensorFlow leaves out what is multiplied by 0, for which others wait.
            at_root = tf.constant(int(process.rank() == root_rank), mean.dtype)
            return mean * tf.placeholder_with_default(at_root, [])

        (value,) = broadcast_alike([x], root_rank, [called])
        return value, mean_at_root

    result: tf.Tensor = sent(x)
    return result


def broadcast_alike(
    tensors: Sequence[tf.Tensor], root_rank: int, names: Sequence[str]
) -> list[tf.Tensor]:
    """Returns rank `root_rank`'s tensors, without gradients; the ranks compare all shapes at once.

    Args:
        tensors: the same number on all ranks, at least one.
        root_rank: the rank that sends.
        names: the names of the exchanges.

    Raises:
        ValueError: there is no such rank.
    """
    process.check_root(root_rank)
    gate = _agreed(f"broadcast(root_rank={root_rank})", names[0], tensors)
    results = []
    for x, name in zip(tensors, names):
        wire = tf.cast(x, tf.uint8) if x.dtype == tf.bool else x
        if root_rank == 0:
            opened = tf.cast(gate, wire.dtype)
            value = collectives.broadcast(wire + opened, name)
        else:
            # The same operations on all ranks: their names may become those of other exchanges.
            part = tf.reshape(wire, [-1])[: tf.size(wire) * int(process.rank() == root_rank)]
            value = tf.reshape(collectives.allgather(part, name, gate), tf.shape(x))
        value.set_shape(x.shape)
        results.append(tf.cast(value, tf.bool) if x.dtype == tf.bool else value)
    return results


def broadcast_name(variable: Any) -> str:
    """Returns the name of the exchange that broadcasts a variable."""
    return _call_name(f"HorovodBroadcast_{_name_of(variable)}", False)


def _reduced(
    tensors: list[tf.Tensor], reduction: int, scales: tuple[float, float], name: str
) -> list[tf.Tensor]:
    """Reduces tensors of one type."""
    before, after = scales
    ranks = process.size()
    kind = f"allreduce(op={_TITLES[reduction]}, prescale_factor={before}, postscale_factor={after})"
    if ranks == 1:  # Horovod scales there, too.
        return [tf.identity(_scaled(_scaled(x, before), after)) for x in tensors]
    if reduction in _FOLDS:
        gate = _agreed(kind, name, tensors)
        return [
            _folded(_scaled(x, before), reduction, after, f"{name}.{place}", gate)
            for place, x in enumerate(tensors)
        ]
    after = after / ranks if reduction == Average else after
    gate = _agreed(kind, name, tensors)
    with _marked(reduction):
        sums = collectives.allreduce_sum([_scaled(x, before) for x in tensors], name, gate)
    return [_scaled(x, after) for x in sums]


def _folded(x: tf.Tensor, reduction: int, after: float, name: str, gate: Any) -> tf.Tensor:
    """Returns the minimum, maximum or product over ranks; its gradient is that of the gradients."""

    @tf.custom_gradient
    def fold(x: tf.Tensor) -> Any:
        parts = collectives.allgather(x[None], name, gate)
        result = _scaled(_FOLDS[reduction](parts, axis=0), after)
        result.set_shape(x.shape)
        return result, lambda gradient: _folded(
            tf.convert_to_tensor(gradient),
            reduction,
            after,
            collectives.name_of_script(f"{name}.gradient"),
            gate,
        )

    result: tf.Tensor = fold(x)
    return result


def _gathered(slices: tf.IndexedSlices, reduction: int, ignore_scope: bool) -> tf.IndexedSlices:
    """Returns the slices of all ranks, which stand for their sum or mean."""
    values = allgather(slices.values, ignore_name_scope=ignore_scope)
    indices = allgather(slices.indices, ignore_name_scope=ignore_scope)
    if reduction == Average:
        values = values / tf.cast(process.size(), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _scaled(x: tf.Tensor, factor: float) -> tf.Tensor:
    """Returns `x * factor` as Horovod's buffers have it: integers are cut off towards zero."""
    if factor == 1.0:
        return x
    if x.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(tf.cast(x, tf.float32) * factor, x.dtype)
    if x.dtype.is_floating:
        return x * tf.constant(factor, x.dtype)
    return tf.cast(tf.cast(x, tf.float64) * factor, x.dtype)


@tf.custom_gradient
def _with_mean_gradient(x: tf.Tensor) -> Any:
    """Returns `x`; its gradient becomes the mean over ranks where it would be the sum."""
    return tf.identity(
        x
    ), lambda gradient: tf.convert_to_tensor(gradient) / tf.cast(process.size(), x.dtype)


def _agreed(
    kind: str, name: str, tensors: Sequence[tf.Tensor], first_dimension: bool = True
) -> tf.Tensor:
    """Returns an int32 zero that exists once all ranks have said that they do the same.

    Each rank sends a number for what it does, and the rank and shape of each tensor.

    Args:
        kind: what is done, with all options.
        name: the call's name.
        tensors: what is exchanged.
        first_dimension: whether ranks must have the same first dimension, too.
    """
    start = 0 if first_dimension else 1
    code = zlib.crc32(" ".join([kind, *(x.dtype.name for x in tensors)]).encode())
    words: list[Any] = [[code]]
    for x in tensors:
        shape: Any = x.shape[start:]
        if x.shape.rank is None or not shape.is_fully_defined():
            shape = tf.shape(x, out_type=tf.int64)[start:]
            words += [tf.cast(tf.rank(x), tf.int64)[None], shape]
        else:
            words += [[x.shape.rank], shape.as_list()]
    gate = _gate(tensors)
    with tf.name_scope("alike"), device_scopes.on_host():
        own = tf.concat([tf.constant(w, tf.int64) if isinstance(w, list) else w for w in words], 0)
        everyones = collectives.allgather(own, f"{collectives.PREFIX}{name}.header", gate)
        expected = tf.tile(own, [process.size()])
        shorter = tf.minimum(tf.size(everyones), tf.size(expected))
        is_alike = tf.logical_and(
            tf.equal(tf.size(everyones), tf.size(expected)),
            tf.reduce_all(tf.equal(everyones[:shorter], expected[:shorter])),
        )
        words_of_error = (
            f"the ranks do not call the same at {name}: this rank calls hvd.{kind} of "
            f"{', '.join(x.dtype.name for x in tensors)}. Types, options or shapes differ. A "
            "number for types and options, then the rank and shape of each tensor, here and of all "
            "ranks:"
        )
        refuse = tf.raw_ops.Assert(
            condition=is_alike, data=[words_of_error, own, everyones], summarize=100
        )
        with tf.control_dependencies([refuse]):
            return tf.identity(gate)


def _gate(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the int32 zero for which a collective waits.

    Inside scope() that is the ranks' agreement on the run. Outside it is any zero that TensorFlow
    doesn't know before the run: it would compute a collective of constants once, on its own.
    """
    graph = graphs.outermost(tf.get_default_graph())
    if SCOPES.is_open:
        return gates_of(graph).of_collective(tensors).zero
    record = graph_state.of(graph, RunTimeZero)
    if record.zero is None:
        with tf.init_scope(), tf.name_scope("horovod/"), device_scopes.on_host():
            record.zero = tf.cast(tf.less(tf.timestamp(), 0), tf.int32)
    return record.zero


@contextmanager
def _marked(reduction: int) -> Iterator[None]:
    """Marks allreduces with Horovod's number of the reduction, as its operations have it."""
    value = attr_value_pb2.AttrValue(i=reduction)
    with tf.get_default_graph()._attr_scope({collectives.REDUCTION: value}):
        yield


def _check(process_set: Any) -> None:
    process.needed()
    process.check_process_set(process_set)


def _reduction(op: int | None, average: bool | None) -> int:
    """Returns the reduction that a script asks for, in the present or in the older way."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is None:
        op = Average if average in (None, True) else Sum
    if op not in (Average, Sum, *_FOLDS):
        raise NotImplementedError(process.unavailable("hvd.Adasum"))
    return op


def _tensor(x: Any) -> tf.Tensor:
    tensor: tf.Tensor = tf.convert_to_tensor(x)
    return tensor


def _name_of(x: Any) -> str:
    """Returns a tensor's name as a part of another name."""
    return re.sub("[^a-zA-Z0-9_]", "_", getattr(x, "name", "value"))


def _call_name(name: str, ignore_scope: bool) -> str:
    """Returns the name by which the ranks' calls find each other, unique in the graph."""
    scope = "" if ignore_scope else tf.get_default_graph().get_name_scope()
    words = re.sub(r"[^a-zA-Z0-9_.\-]", ".", f"{scope}/{name}" if scope else name)
    return collectives.name_of_script(words)
