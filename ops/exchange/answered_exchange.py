"""Exchanges keys and rows through shared memory; owners write each row where it is needed.

An owner looks up a rank's rows as soon as that rank's keys have arrived, whatever the other ranks
are doing. It writes the rows directly into the memory of the tensor that the rank gets
(`ops/native/answer.cc`). While rows still arrive, the rank pools lookups whose rows it has from all
owners. All of the following must hold; else keys, lookups and rows go one after the other
(`collective.ops.exchange.key_exchange`, `collective.ops.exchange.embedding_bag`):

* shared memory carries everything (`collective.ops.communication.carrier_choice`), and tables are
  in host memory: between hosts, with merging on hosts, and on GPUs there is no memory to write to;
* keys are local rows: the keys of dynamic tables must be found or inserted for all ranks at once,
  so that row numbers don't depend on which rank asks first;
* rows travel in their own type: otherwise they are cast on the way;
* keys aren't exchanged a batch ahead (`collective.prefetch`): rows are read in the step itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.communication import carrier_choice, collectives
from collective.ops.communication.gate import KeyRequest, gates_of
from collective.ops.communication.shared_memory_carrier import SHARED_MEMORY
from collective.ops.exchange import embedding_bag
from collective.ops.exchange.embedding_bag import Pooling, Request, Section
from collective.ops.exchange.key_exchange import Wire
from collective.ops.placement import is_dynamic


class AnsweredExchange(NamedTuple):
    """Holds the results of both directions of an exchange.

    Attributes:
        message: int64, the words that the ranks sent, rank by rank.
        splits: [N] int32, how many words came from each.
        rows: [E] float32, the rows that this rank asked for.
        early: variant, for `embedding_bag.pool`: the members that were pooled while rows came.
    """

    message: tf.Tensor
    splits: tf.Tensor
    rows: tf.Tensor
    early: tf.Tensor


def is_possible(kinds: Sequence[int], counted: Sequence[bool], wire: Wire) -> bool:
    """Tells whether a group's tables allow this exchange, apart from keys ahead and GPUs.

    Args:
        kinds: the kind of each table.
        counted: for each table, whether it counts how often keys are asked for.
        wire: the types in which rows and gradients travel.
    """
    return (
        collectives.size() > 1
        and carrier_choice.in_force() == carrier_choice.SHARED_MEMORY
        and wire == Wire(tf.float32, tf.float32)
        and not any(counted)
        and not any(map(is_dynamic, kinds))
    )


def awaits_rows(op: tf.Operation) -> bool:
    """Tells whether `op` ends such an exchange: it awaits the rows that a rank asked for.

    A rank that asked for no rows may skip it: the exchange of keys answers the peers.
    """
    return op.type == "CollectiveSharedAlltoallRows"


def exchange(
    handles: Sequence[tf.Tensor],
    request: Request,
    pooling: Pooling,
    sections: Sequence[Section],
    kinds: Sequence[int],
    shapes: Sequence[Any],
    names: tuple[str, str],
    gate: Any,
) -> AnsweredExchange:
    """Exchanges keys and rows of static tables.

    The gradient for each handle is `IndexedSlices` of distinct rows, as for `embedding_bag.gather`.

    Args:
        handles: for each table the resource handle of its shard [V, D].
        request: what this rank asks for.
        pooling: how the rows are pooled.
        sections, kinds: of the group.
        shapes: for each table the shape of its shard, as far as it is known.
        names: the names of the two collectives, for keys and for rows.
        gate: the gate's zero.
    """
    keys_name, rows_name = names
    gates_of(tf.get_default_graph()).key_requests[keys_name] = KeyRequest(
        request.message, request.splits, 2 * len(sections)
    )
    library = native_library.on_host()
    with SHARED_MEMORY.scope("Alltoall", request.message, keys_name, gate) as opened:
        keys = library.collective_shared_alltoall_keys(
            request.message,
            request.splits + opened,
            handles,
            rows_name=rows_name,
            max_norms=[s.max_norm for s in sections],
            shapes=shapes,
            **embedding_bag.layout_attributes(sections, kinds, collectives.size()),
            name=keys_name,
        )
    with SHARED_MEMORY.scope("Alltoall", keys.rows, rows_name, gate):
        rows = library.collective_shared_alltoall_rows(
            keys.rows,
            keys.row_splits,
            keys.answers,
            request.positions,
            pooling.samples,
            pooling.weights,
            **embedding_bag.lookup_attributes(pooling.members),
            name=rows_name,
        )
    return AnsweredExchange(keys.output, keys.received_splits, rows.output, rows.early)


@tf.RegisterGradient("CollectiveSharedAlltoallRows")
def _rows_gradient(op: tf.Operation, gradient: Any, _: Any) -> list[Any]:
    # As for any all-to-all of rows: no gradient leaves before this rank has read the step's rows.
    with tf.control_dependencies([op.inputs[0]] if op.graph is tf.get_default_graph() else []):
        gradient = tf.identity(tf.convert_to_tensor(gradient))
    base, gate = collectives.name_and_gate(op)
    name = collectives.unique_name(base + ".gradient")
    back, _ = SHARED_MEMORY.alltoall(gradient, op.inputs[1], name, gate, "gradients")
    return [back, *[None] * (len(op.inputs) - 1)]  # Weights get their gradients from the pool.
