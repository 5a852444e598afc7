"""Defines the collectives, over Horovod, shared memory or NCCL (see `carriers`).

Nothing else in the package calls the operations of any of them.

Symbols: N ranks, r this rank. Every collective

* has an explicit name, under which the ranks' calls find each other: `unique_name` numbers it
  within its graph, so that ranks which build the same graph use the same names in the same order;
* takes a `gate` (see `gate`), an int32 zero that exists only at run time. TensorFlow
  believes these operations to be stateless: without such an input a collective of constants
  would be folded, that is, run once by the graph optimizer, at a time of its own on each rank;
* is differentiable any number of times: the gradient of a collective is the transposed collective,
  which makes `tf.gradients` the gradient of the sum of all ranks' `ys`;
* is the identity with one rank.

Source: Horovod 0.28 (`horovod.tensorflow`).
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.communication import carriers, hierarchy, membership, nccl
from collective.ops.communication.collective_names import PREFIX, near
from collective.ops.communication.horovod_library import hvd
from collective.ops.communication.membership import Process, rank, size
from collective.ops.graph import control_flow, graph_analysis
from collective.ops.graph.device_scopes import beside
from collective.ops.graph.graph_state import state_of
from collective.ops.graph.graphs import is_function, outermost
from collective.ops.graph.sessions import session_before_scripts
from collective.tensorflow_internals.graphs import attr_value_pb2, config

Phase = Literal["other", "rows", "gradients"]
# Begins the names of operations that all ranks must run, or none, in addition to collectives.
ALIKE = "collective/alike/"
# How the types of the operations of carriers begin, other than Horovod's.
_TYPES = {carriers.SHARED_MEMORY: "CollectiveShared", carriers.NCCL: "CollectiveNccl"}
_counters: weakref.WeakKeyDictionary[tf.Graph, collections.Counter] = weakref.WeakKeyDictionary()


def init() -> None:
    """Joins the job that the launcher (or horovodrun, mpirun, srun) described in the environment.

    Without a description the process is a job of its own.

    Raises:
        ValueError: COLLECTIVE_CARRIER names no carrier.
        collective.job.errors.UsageError: mpirun or srun has started this process, and the ranks
            can't find each other.
    """
    process = membership.join()
    if carriers.join(process, _words_of_all):
        hierarchy.settle(process, _words_of_all, lambda: _probe(process))


def _words_of_all(words: str) -> list[str]:
    """Returns what each rank says; all ranks call it at the same time."""
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        data, size_of_data = tf.placeholder(tf.uint8, [None]), tf.placeholder(tf.int32, [1])
        gathered = [
            hvd.allgather(x, name=f"{PREFIX}words.{name}", ignore_name_scope=True)
            for name, x in (("text", data), ("sizes", size_of_data))
        ]
        with session_before_scripts() as session:
            text = np.frombuffer(words.encode(), np.uint8)
            joined, sizes = session.run(gathered, {data: text, size_of_data: [len(text)]})
    return [part.tobytes().decode() for part in np.split(joined, np.cumsum(sizes)[:-1])]


@contextlib.contextmanager
def _probe(process: Process) -> Iterator[Callable[[bool], None]]:
    """Gives the function by which all ranks send `hierarchy.PROBE` bytes at the same time."""
    ranks, here = process.size, process.local_size
    within_host, to_others = np.zeros(here, np.int32), np.zeros(ranks, np.int32)
    within_host[(process.local_rank + 1) % here] = to_others[(process.rank + here) % ranks] = 1
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        data, splits = tf.zeros([1, hierarchy.PROBE], tf.uint8), tf.placeholder(tf.int32, [None])
        operations = [
            alltoall_by(carrier, data, splits, f"{PREFIX}probe.{carrier}", 0, "other")[1].op
            for carrier in (carriers.HOROVOD, carriers.SHARED_MEMORY)
        ]
        with session_before_scripts() as session:
            to = [to_others, within_host]
            yield lambda within: session.run(operations[within], {splits: to[within]})


def unique_name(base: str) -> str:
    """Returns `collective.base` for its first use in the graph, then `collective.base.1`, …"""
    base = base.replace("/", ".")  # Horovod uses only what follows the last slash.
    counter = _counters.setdefault(outermost(tf.get_default_graph()), collections.Counter())
    counter[base] += 1
    return PREFIX + base + (f".{counter[base] - 1}" if counter[base] > 1 else "")


def collective_name(op: tf.Operation) -> str | None:
    """Returns the name under which `op` meets its peers; None for operations of others."""
    name = str(op.name).rpartition("/")[2]
    return name if graph_analysis.is_of_carrier(op.type) and name.startswith(PREFIX) else None


def carrier_of(op: tf.Operation) -> str | None:
    """Returns the carrier of the collective `op`; None for any other operation."""
    if not graph_analysis.is_collective(op.type):
        return None
    for carrier, beginning in _TYPES.items():
        if str(op.type).startswith(beginning):
            return carrier
    return carriers.HOROVOD


def is_scripts_own(op: tf.Operation) -> bool:
    """Tells whether a script made the collective `op` by itself, to average losses, say."""
    return graph_analysis.is_collective(op.type) and collective_name(op) is None


@contextlib.contextmanager
def collective_scope(kind: str, x: tf.Tensor, name: str, gate: Any) -> Iterator[Any]:
    """Prepares the graph for a carrier's operation on `x`; gives the gate as it is known there.

    Nothing else may have the operation's name there, or TensorFlow would add a number to it.

    The name is also an attribute of the operation. TensorFlow believes that two operations of the
    same inputs and attributes are one, and drops the second: the keys of two tables that are looked
    up by the same ids, say. But it wouldn't on a rank that answers without data, which would wait
    for them for ever.
    """
    graph = tf.get_default_graph()
    control_flow.one_at_a_time()
    if is_function(graph):
        # The gradient of a branch or a function takes the gate from here: it can't reach further
        # outside.
        gate = graph.capture(gate)
    state_of(graph).gate_by_collective[name] = gate
    name_attribute = {"_collective": attr_value_pb2.AttrValue(s=name.encode())}
    with (
        tf.name_scope("meeting"),
        beside(x),
        graph._attr_scope(name_attribute),
        graph.gradient_override_map(
            {
                f"{beginning}{kind}": f"Collective{kind}"
                for beginning in ("Horovod", *_TYPES.values())
            }
        ),
    ):
        yield gate


def _carrier(x: tf.Tensor, chosen: str | None = None) -> str:
    """Returns the carrier of a collective of `x`: the chosen one, or the one that is in force.

    What was placed in the host's memory doesn't go by way of a GPU.
    """
    carrier = chosen or carriers.in_force()
    if carrier == carriers.NCCL and not nccl.moves_host_memory():
        if tf.DeviceSpec.from_string(x.device).device_type == "CPU":
            return carriers.SHARED_MEMORY
    return carrier


def _as_wire(x: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
    """Returns `x` in a type that Horovod moves by all-to-all, and the type to go back to.

    Bits of bfloat16, which it doesn't move, travel as float16's, whatever they mean.
    """
    return (_bits_as(x, tf.float16), tf.bfloat16) if x.dtype == tf.bfloat16 else (x, None)


def _bits_as(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Casts bits as `tf.bitcast`, differentiably: the bits of the gradient go back the same way."""
    with tf.get_default_graph().gradient_override_map({"Bitcast": "CollectiveBitcast"}):
        return tf.bitcast(x, dtype)


@tf.RegisterGradient("CollectiveBitcast")
def _bitcast_gradient(op: tf.Operation, gradient: Any) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, tf.shape(op.inputs[0])[0]
        )
    # The gradient travels in a type of its own (collective.ops.exchange.key_exchange).
    if gradient.dtype != op.outputs[0].dtype:
        return gradient
    return _bits_as(gradient, op.inputs[0].dtype)


def name_and_gate(op: tf.Operation) -> tuple[str, Any]:
    """Returns (base of the name, gate) of the collective whose gradient is asked for."""
    name, graph = str(op.name).rpartition("/")[2], op.graph
    while name not in state_of(graph).gate_by_collective:
        graph = graph.outer_graph
    return name[len(PREFIX) :], state_of(graph).gate_by_collective[name]


def alltoall(
    x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase = "other"
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends rows of `x` to the ranks, `splits[k]` consecutive ones to rank k.

    Args:
        x: [S, ...], any numeric dtype, rows in the order of the ranks they go to.
        splits: [N] int32, summing to S. Below 2**31 rows: Horovod counts them in int32.
        name: the explicit name, `unique_name(...)`.
        gate: the gate's zero.
        phase: what it is for; see `collective.coordination.run_analysis`.

    Returns:
        ([R, ...] the rows received, in the order of the ranks they came from; [N] int32, how many
        came from each).
    """
    if size() == 1:
        return tf.identity(x), tf.identity(splits)
    if carriers.in_force() == carriers.MIXED:
        return _mixed_alltoall(x, splits, name, gate, phase)
    return alltoall_by(_carrier(x), x, splits, name, gate, phase)


def alltoall_within_host(
    x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase = "other"
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges as `alltoall` does, among the L ranks of this host: `splits` is [L].

    A collective of all ranks may have the same name.
    """
    return alltoall_by(carriers.SHARED_MEMORY, x, splits, near(name), gate, phase)


def alltoall_between_hosts(
    x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase = "other"
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges as `alltoall` does, all of it by Horovod: for what ranks of a host don't share."""
    return alltoall_by(carriers.HOROVOD, x, splits, name, gate, phase)


def alltoall_by(
    carrier: str, x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges as `alltoall` does, by one carrier.

    Through shared memory `splits` has a number for each rank of the host.
    """
    wire, back = _as_wire(x)
    with collective_scope("Alltoall", x, name, gate) as opened:
        splits = splits + opened
        if carrier == carriers.SHARED_MEMORY:
            out, received = native_library.on_host().collective_shared_alltoall(
                wire, splits, phase=phase, name=name
            )
        elif carrier == carriers.NCCL:
            out, received = native_library.library().collective_nccl_alltoall(
                wire, splits, phase=phase, name=name
            )
        else:
            out, received = hvd.alltoall(wire, splits=splits, name=name, ignore_name_scope=True)
    out.set_shape([None] + wire.shape[1:].as_list())
    return (_bits_as(out, back) if back else out), received


def _mixed_alltoall(
    x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges as `alltoall` does: within the host through memory, with others by Horovod.

    The ranks of a host follow each other, so what they give and take is in one piece.
    """
    host = carriers.ranks_of_host()
    lower, near_splits, upper = _by_host(splits, host)
    x_lower, x_near, x_upper = tf.split(
        x, [tf.reduce_sum(part) for part in (lower, near_splits, upper)], num=3
    )
    from_near, near_received = alltoall_by(
        carriers.SHARED_MEMORY, x_near, near_splits, near(name), gate, phase
    )
    far_splits = tf.concat([lower, tf.zeros_like(near_splits), upper], 0)
    far, far_received = alltoall_by(
        carriers.HOROVOD, tf.concat([x_lower, x_upper], 0), far_splits, name, gate, phase
    )
    lower, _, upper = _by_host(far_received, host)
    far_lower, far_upper = tf.split(far, [tf.reduce_sum(part) for part in (lower, upper)], num=2)
    return tf.concat([far_lower, from_near, far_upper], 0), tf.concat(
        [lower, near_received, upper], 0
    )


def _by_host(splits: tf.Tensor, host: range) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Cuts `splits` [N]: those of lower ranks, of the ranks of this host, of higher ones."""
    return splits[: host.start], splits[host.start : host.stop], splits[host.stop :]


@tf.RegisterGradient("CollectiveAlltoall")
def _alltoall_gradient(op: tf.Operation, gradient: Any, _: Any) -> tuple[tf.Tensor, None]:
    # The gradient of a gather of rows is summed by row before it travels.
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, tf.shape(op.outputs[0])[0]
        )
    # Peers may update their rows as soon as they have every rank's gradient: send none before this
    # rank has read the rows of this step (they are the input of `op`), so that a lookup fetched
    # together with its own update is the value before. (The gradient of a
    # branch or a loop of version 2 is in another graph, which runs later anyway.)
    with tf.control_dependencies([op.inputs[0]] if op.graph is tf.get_default_graph() else []):
        gradient = tf.identity(gradient)
    base, gate = name_and_gate(op)
    name = unique_name(base + ".gradient")
    carrier = carrier_of(op) or carriers.HOROVOD
    return alltoall_by(carrier, gradient, op.outputs[1], name, gate, "gradients")[0], None


def allreduce_sum(tensors: Sequence[tf.Tensor], name: str, gate: Any) -> list[tf.Tensor]:
    """Returns the element-wise sums over ranks of `tensors`, in one collective.

    The tensors have one dtype, and the same shapes on every rank.
    """
    if size() == 1:
        return [tf.identity(x) for x in tensors]
    dtype = tensors[0].dtype
    if in_order():
        flat = tf.concat([tf.reshape(x, [-1]) for x in tensors], 0)
        pieces = tf.split(
            _sum_in_order(flat, name, gate), [_elements(x) for x in tensors], num=len(tensors)
        )
        return _marked_replicated([_like(piece, x) for piece, x in zip(pieces, tensors)])
    carrier = _carrier(tensors[0])
    # The gate travels as one more element, which costs no pass over the data.
    with collective_scope("Allreduce", tensors[0], name, gate) as opened:
        if carrier == carriers.NCCL:
            sums = native_library.library().collective_nccl_allreduce(
                list(tensors), opened, name=name
            )
            return _marked_replicated(sums)
        gate_element = tf.cast(opened, dtype)[None]
        if carrier == carriers.SHARED_MEMORY:
            *sums, _ = native_library.on_host().collective_shared_allreduce(
                [*tensors, gate_element], name=name
            )
            return _marked_replicated(sums)
        flat = tf.concat([tf.reshape(x, [-1]) for x in tensors] + [gate_element], 0)
        out = hvd.allreduce(flat, op=hvd.Sum, name=name, ignore_name_scope=True)
    pieces = tf.split(out, [_elements(x) for x in tensors] + [1])[:-1]
    return _marked_replicated([_like(piece, x) for piece, x in zip(pieces, tensors)])


def _marked_replicated(sums: list[tf.Tensor]) -> list[tf.Tensor]:
    state_of(outermost(sums[0].graph)).replicated_operations.update(x.op for x in sums)
    return sums


def in_order() -> bool:
    """Tells whether sums over ranks must be formed in the order of the ranks.

    TensorFlow's deterministic kernels form their sums in one order. In Horovod's ring, where the
    sum of an element starts depends on its place in the buffer, and so on what is reduced at the
    same time. The sum of two has one order only.
    """
    return size() > 2 and bool(config.is_op_determinism_enabled())


def _sum_in_order(x: tf.Tensor, name: str, gate: Any) -> tf.Tensor:
    """Returns the sum over ranks of `x` [E]: rank k adds up all parts k and shares the sum."""
    ranks = size()

    @tf.custom_gradient
    def add(x: tf.Tensor) -> Any:
        part = (tf.size(x) + ranks - 1) // ranks
        padded = tf.pad(x, [[0, part * ranks - tf.size(x)]])
        received, _ = alltoall(padded, tf.fill([ranks], part), f"{name}.parts", gate)
        own_sum = tf.add_n(tf.unstack(tf.reshape(received, [ranks, part])))
        return allgather(own_sum, f"{name}.sums", gate)[
            : tf.size(x)
        ], lambda gradient: _sum_in_order(
            gradient, unique_name(name[len(PREFIX) :] + ".gradient"), gate
        )

    return add(x)


@tf.RegisterGradient("CollectiveAllreduce")
def _allreduce_gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
    base, gate = name_and_gate(op)
    tensors = [tf.convert_to_tensor(gradient) for gradient in gradients]
    sums = allreduce_sum(tensors, unique_name(base + ".gradient"), gate)
    return [*sums, *[None] * (len(op.inputs) - len(sums))]  # NCCL's has the gate as an input.


def allgather(x: tf.Tensor, name: str, gate: Any, carrier: str | None = None) -> tf.Tensor:
    """Returns the ranks' `x` [S_k, ...] one below the other; S may differ between ranks.

    Args:
        x: of any numeric dtype, of the same shape on every rank except for S.
        name: the explicit name.
        gate: the gate's zero.
        carrier: by default the one that is in force.
    """
    if size() == 1:
        return tf.identity(x)
    wire, back = _as_wire(x)
    carrier = _carrier(x, carrier)
    with collective_scope("Allgather", x, name, gate) as opened:
        if carrier == carriers.NCCL:
            out = native_library.library().collective_nccl_allgather(wire, opened, name=name)
            out.set_shape([None] + wire.shape[1:].as_list())
            return _bits_as(out, back) if back else out
        # Nothing may be added to bits that stand for another type's.
        gated = (
            tf.where(tf.equal(opened, 0), wire, tf.zeros_like(wire))
            if back
            else wire + tf.cast(opened, wire.dtype)
        )
        if carrier == carriers.SHARED_MEMORY:
            out = native_library.on_host().collective_shared_allgather(gated, name=name)
        else:
            out = hvd.allgather(gated, name=name, ignore_name_scope=True)
    out.set_shape([None] + x.shape[1:].as_list())
    return _bits_as(out, back) if back else out


@tf.RegisterGradient("CollectiveAllgather")
def _allgather_gradient(op: tf.Operation, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    base, gate = name_and_gate(op)
    own_size = tf.shape(op.inputs[0])[0]
    sizes = allgather(own_size[None], unique_name(base + ".sizes"), gate)
    total = allreduce_sum([tf.convert_to_tensor(gradient)], unique_name(base + ".gradient"), gate)[
        0
    ]
    first = tf.reduce_sum(sizes[: rank()])
    return [total[first : first + own_size], *[None] * (len(op.inputs) - 1)]


def _register_for_tapes() -> None:
    """Registers the gradients by the operations' own types, too: a tape knows no others."""

    def register(kind: str, gradient: Callable[..., Any]) -> None:
        for beginning in _TYPES.values():

            @tf.RegisterGradient(f"{beginning}{kind}")
            def _taped(op: Any, *gradients: Any) -> Any:
                return gradient(op.outputs[0].op, *gradients)  # a tape's `op` has no name

    register("Alltoall", _alltoall_gradient)
    register("Allreduce", _allreduce_gradient)
    register("Allgather", _allgather_gradient)


_register_for_tapes()


def broadcast(x: tf.Tensor, name: str) -> tf.Tensor:
    """Returns rank 0's `x`, of the same shape on every rank.

    It is not differentiable; `x` is read at run time. Ranks haven't agreed on it, as they have on
    other collectives of a run, so it goes by the carrier of their agreement.
    """
    if size() == 1:
        return tf.identity(x)
    wire, back = _as_wire(x)
    with tf.name_scope("meeting"), beside(x):
        carrier = _carrier(x, carriers.of_broadcasts())
        if carrier == carriers.SHARED_MEMORY:
            out = native_library.on_host().collective_shared_broadcast(wire, name=name)
        elif carrier == carriers.NCCL:
            out = native_library.library().collective_nccl_broadcast(wire, name=name)
        else:
            out = hvd.broadcast(wire, 0, name=name, ignore_name_scope=True)
    out.set_shape(x.shape)
    return _bits_as(out, back) if back else out


def _elements(x: tf.Tensor) -> Any:
    return x.shape.num_elements() if x.shape.is_fully_defined() else tf.size(x)


def _like(piece: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    piece = tf.reshape(piece, tf.shape(x))
    piece.set_shape(x.shape)
    return piece
