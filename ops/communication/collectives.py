"""Defines the collectives over Horovod, shared memory or NCCL (see `carrier_choice`).

Nothing else in the package calls the operations of a carrier.

Symbols: N ranks, r this rank. Every collective

* has an explicit name, by which the ranks' calls find each other: `unique_name` numbers it within
  its graph, so that ranks that build the same graph use the same names in the same order;
* takes a `gate` (see `gate`), an int32 zero that exists only at run time. TensorFlow treats these
  operations as stateless: without such an input a collective of constants would be folded. The
  graph optimizer would then run it once, at a different time on each rank;
* is differentiable any number of times: the gradient of a collective is the transposed collective,
  so that `tf.gradients` is the gradient of the sum of all ranks' `ys`;
* is the identity with one rank.

Source: Horovod 0.28 (`horovod.tensorflow`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.job import progress_board
from collective.job.progress import Progress
from collective.ops.communication import carrier_choice, hierarchy, membership
from collective.ops.communication.carrier import Carrier, OpenedGates, Phase, elements, like
from collective.ops.communication.collective_names import PREFIX, near
from collective.ops.communication.horovod_carrier import HOROVOD
from collective.ops.communication.horovod_library import hvd
from collective.ops.communication.membership import Process, rank, size
from collective.ops.communication.mixed_carrier import MIXED
from collective.ops.communication.nccl_carrier import NCCL
from collective.ops.communication.shared_memory_carrier import SHARED_MEMORY
from collective.ops.graph import graph_analysis, graph_state
from collective.ops.graph.graphs import outermost
from collective.ops.graph.sessions import session_before_scripts
from collective.tensorflow_internals.graphs import config

# Begins the names of operations, besides collectives, that either all ranks or none must run.
ALIKE = "collective/alike/"
# An attribute of a script's own allreduces by this library: Horovod's number of the reduction.
REDUCTION = "_reduce_op"
# Begins the names of collectives that a script itself makes, by functions of Horovod's names.
SCRIPTS = "hvd."
CARRIERS = {carrier.name: carrier for carrier in (HOROVOD, SHARED_MEMORY, NCCL, MIXED)}


@dataclasses.dataclass
class UsedNames:
    """Records how many collectives of a graph have each name."""

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass
class ReplicatedOperations:
    """Records operations of a graph by which ranks have made something the same on all of them.

    Attributes:
        noted: operations whose results are the same, though their inputs aren't.
    """

    noted: set[tf.Operation] = dataclasses.field(default_factory=set)


def init() -> None:
    """Joins the job that the launcher (or horovodrun, mpirun, srun) described in the environment.

    Without a description the process is a job of one rank.

    Raises:
        ValueError: COLLECTIVE_CARRIER doesn't name a carrier.
        collective.job.errors.UsageError: mpirun or srun has started this process, and the ranks
            can't find each other.
    """
    with contextlib.ExitStack() as meeting:
        if not membership.has_joined():
            progress = meeting.enter_context(Progress(os.environ).does(progress_board.JOINING))
            progress.enters(progress_board.Phase.MEETING)
        process = membership.join()
        if carrier_choice.join(process, _allgather_words):
            hierarchy.settle(process, _allgather_words, lambda: _probe(process))


def _allgather_words(words: str) -> list[str]:
    """Returns each rank's text; all ranks call it at the same time."""
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
    """Yields a function by which all ranks send `hierarchy.PROBE` bytes at the same time."""
    ranks, here = process.size, process.local_size
    within_host, to_others = np.zeros(here, np.int32), np.zeros(ranks, np.int32)
    within_host[(process.local_rank + 1) % here] = to_others[(process.rank + here) % ranks] = 1
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        data, splits = tf.zeros([1, hierarchy.PROBE], tf.uint8), tf.placeholder(tf.int32, [None])
        operations = [
            carrier.alltoall(data, splits, f"{PREFIX}probe.{carrier.name}", 0, "other")[1].op
            for carrier in (HOROVOD, SHARED_MEMORY)
        ]
        with session_before_scripts() as session:
            to = [to_others, within_host]
            yield lambda within: session.run(operations[within], {splits: to[within]})


def unique_name(base: str) -> str:
    """Returns `collective.base` for its first use in the graph, then `collective.base.1`, …"""
    base = base.replace("/", ".")  # Horovod uses only what follows the last slash.
    counts = graph_state.of(outermost(tf.get_default_graph()), UsedNames).counts
    counts[base] += 1
    return PREFIX + base + (f".{counts[base] - 1}" if counts[base] > 1 else "")


def name_of_script(base: str) -> str:
    """Returns a name like `unique_name`'s for a collective that the script itself makes."""
    return unique_name(SCRIPTS + base).removeprefix(PREFIX)


def collective_name(op: tf.Operation) -> str | None:
    """Returns the name by which `op` meets its peers; None if `op` isn't a collective."""
    name = str(op.name).rpartition("/")[2]
    return name if graph_analysis.is_of_carrier(op.type) and name.startswith(PREFIX) else None


def carrier_of(op: tf.Operation) -> Carrier | None:
    """Returns the carrier of the collective `op`; None for any other operation."""
    if not graph_analysis.is_collective(op.type):
        return None
    return next(carrier for carrier in CARRIERS.values() if str(op.type).startswith(carrier.prefix))


def is_scripts_own(op: tf.Operation) -> bool:
    """Tells whether the script itself made the collective `op`, for example to average losses."""
    return graph_analysis.is_collective(op.type) and collective_name(op) is None


def _carrier(x: tf.Tensor, chosen: str | None = None) -> Carrier:
    """Returns the carrier of a collective of `x`: `chosen`, or else the one in force."""
    return CARRIERS[chosen or carrier_choice.in_force()].used_for(x)


def name_and_gate(op: tf.Operation) -> tuple[str, Any]:
    """Returns (base of the name, gate) of the collective whose gradient is requested."""
    name, graph = str(op.name).rpartition("/")[2], op.graph
    while name not in (zeros := graph_state.of(graph, OpenedGates).zeros):
        graph = graph.outer_graph
    return name.removeprefix(PREFIX), zeros[name]


def alltoall(
    x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase = "other"
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends rows of `x` to the ranks, `splits[k]` consecutive ones to rank k.

    Args:
        x: [S, ...], any numeric dtype, rows in the order of their destination ranks.
        splits: [N] int32, summing to S. Below 2**31 rows: Horovod counts them in int32.
        name: the explicit name, `unique_name(...)`.
        gate: the gate's zero.
        phase: its purpose; see `collective.coordination.run_analysis`.

    Returns:
        ([R, ...] the received rows, in the order of the ranks that sent them; [N] int32, the
        number of rows from each).
    """
    if size() == 1:
        return tf.identity(x), tf.identity(splits)
    return _carrier(x).alltoall(x, splits, name, gate, phase)


def alltoall_within_host(
    x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase = "other"
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges like `alltoall`, among the L ranks of this host: `splits` is [L].

    A collective of all ranks may have the same name.
    """
    return SHARED_MEMORY.alltoall(x, splits, near(name), gate, phase)


def alltoall_between_hosts(
    x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase = "other"
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges like `alltoall`, all of it by Horovod: for what ranks of a host don't share."""
    return HOROVOD.alltoall(x, splits, name, gate, phase)


@tf.RegisterGradient("CollectiveAlltoall")
def _alltoall_gradient(op: tf.Operation, gradient: Any, _: Any) -> tuple[tf.Tensor, None]:
    # The gradient of a gather of rows is summed by row before it travels.
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, tf.shape(op.outputs[0])[0]
        )
    # Peers may update their rows as soon as they have every rank's gradient. So nothing is sent
    # before this rank has read the rows of this step (the input of `op`): a lookup that is fetched
    # together with its own update returns the value before. (The gradient of a branch or a loop of
    # version 2 is in another graph, which runs later anyway.)
    with tf.control_dependencies([op.inputs[0]] if op.graph is tf.get_default_graph() else []):
        gradient = tf.identity(gradient)
    base, gate = name_and_gate(op)
    name = unique_name(base + ".gradient")
    carrier = carrier_of(op)
    assert carrier is not None
    return carrier.alltoall(gradient, op.outputs[1], name, gate, "gradients")[0], None


def allreduce_sum(tensors: Sequence[tf.Tensor], name: str, gate: Any) -> list[tf.Tensor]:
    """Returns the element-wise sums over ranks of `tensors`, in one collective.

    The tensors have the same dtype, and the same shapes on every rank.
    """
    if size() == 1:
        return [tf.identity(x) for x in tensors]
    if in_order():
        flat = tf.concat([tf.reshape(x, [-1]) for x in tensors], 0)
        pieces = tf.split(
            _sum_in_order(flat, name, gate), [elements(x) for x in tensors], num=len(tensors)
        )
        return _marked_replicated([like(piece, x) for piece, x in zip(pieces, tensors)])
    return _marked_replicated(_carrier(tensors[0]).allreduce_sum(tensors, name, gate))


def _marked_replicated(sums: list[tf.Tensor]) -> list[tf.Tensor]:
    note_replicated(sums)
    return sums


def note_replicated(tensors: Iterable[tf.Tensor]) -> None:
    """Notes that these tensors are the same on all ranks."""
    for x in tensors:
        replicated_operations(outermost(x.graph)).add(x.op)


def replicated_operations(graph: tf.Graph) -> set[tf.Operation]:
    """Returns the noted operations of `graph`, which a session runs."""
    return graph_state.of(graph, ReplicatedOperations).noted


def in_order() -> bool:
    """Tells whether sums over ranks must be formed in the order of the ranks.

    TensorFlow's deterministic kernels form their sums in one order. In Horovod's ring, the position
    of an element in the buffer decides where its sum starts, and so does what is reduced at the
    same time. A sum of two has only one order.
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
            gradient, unique_name(name.removeprefix(PREFIX) + ".gradient"), gate
        )

    return add(x)


@tf.RegisterGradient("CollectiveAllreduce")
def _allreduce_gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
    base, gate = name_and_gate(op)
    tensors = [tf.convert_to_tensor(gradient) for gradient in gradients]
    sums = allreduce_sum(tensors, unique_name(base + ".gradient"), gate)
    return [*sums, *[None] * (len(op.inputs) - len(sums))]  # NCCL's has the gate as an input.


def allgather(x: tf.Tensor, name: str, gate: Any, carrier: str | None = None) -> tf.Tensor:
    """Returns the concatenation of the ranks' `x` [S_k, ...]; S may differ between ranks.

    Args:
        x: of any numeric dtype; its shape is the same on every rank except for S.
        name: the explicit name.
        gate: the gate's zero.
        carrier: the carrier; by default the one in force.
    """
    if size() == 1:
        return tf.identity(x)
    return _carrier(x, carrier).allgather(x, name, gate)


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
    """Registers the gradients also under the operations' types, the only ones that tapes know."""

    def register(kind: str, gradient: Callable[..., Any]) -> None:
        for carrier in CARRIERS.values():
            if carrier.is_of_library:

                @tf.RegisterGradient(f"{carrier.prefix}{kind}")
                def _taped(op: Any, *gradients: Any) -> Any:
                    return gradient(op.outputs[0].op, *gradients)  # a tape's `op` has no name

    register("Alltoall", _alltoall_gradient)
    register("Allreduce", _allreduce_gradient)
    register("Allgather", _allgather_gradient)


_register_for_tapes()


def broadcast(x: tf.Tensor, name: str) -> tf.Tensor:
    """Returns rank 0's `x`, whose shape is the same on every rank.

    It is not differentiable; `x` is read at run time. Unlike other collectives of a run, ranks
    haven't agreed on it, so it uses the carrier of their agreement.
    """
    if size() == 1:
        return tf.identity(x)
    return _carrier(x, carrier_choice.of_broadcasts()).broadcast(x, name)
